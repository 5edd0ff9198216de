"""A save that goes on while the model trains: one thread per rank writes a copy of the state.

No collective runs in the thread. A rank's file is announced by its side record, and rank 0's thread commits
when it sees all of them. The progress of the threads travels as a small number (`SaveStage`) in the record
that the ranks exchange at every step boundary. `finish` is the collective end, for a failure and for callers
that must wait (the next save, a load, the end). Made by `writer.begin`, owned by the engine.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from zerotrain.runtime.checkpoint.errors import CheckpointError
from zerotrain.runtime.checkpoint.group import RankGroup
from zerotrain.runtime.checkpoint.image import Image
from zerotrain.runtime.checkpoint.outcome import Outcome, SaveResult, agree
from zerotrain.runtime.checkpoint.retention import retain
from zerotrain.runtime.checkpoint.stepfolder import StepFolder

POLL_SECONDS = 0.05
"""Seconds between two polls of rank 0 for the other ranks' side records."""

VISIBLE_SECONDS = 10.0
"""Seconds, after every rank reported its file, for a network file system to show the files to rank 0."""

EXIT_SECONDS = 60.0
"""Seconds that a process which ends by itself waits for the other ranks' files."""


class SaveStage(IntEnum):
    """Progress of a rank's thread; fits two bits."""

    WRITING = 0
    WRITTEN = 1
    """The rank's file is durable; on rank 0 the commit may be under way."""
    FAILED = 2
    DURABLE = 3
    """The checkpoint is committed; only rank 0 reaches this stage."""


class BackgroundSave:
    """One save under way. `stage` may be read at any time; `finish` or `settle` ends it, once."""

    def __init__(
        self, image: Image, folder: StepFolder, *, group: RankGroup, keep_last: int | None, started: float
    ) -> None:
        """Start the thread. `image` must not change any more; `started` is the monotonic time of the
        request."""
        self.folder = folder
        self.num_bytes = image.num_bytes
        self.stage = SaveStage.WRITING
        self._group = group
        self._keep_last = keep_last
        self._started = started
        self._written = Outcome()
        self._committed = Outcome()
        self._removed: tuple[str, ...] = ()
        self._durable_at = 0.0
        self._seconds = 0.0
        self._is_written = threading.Event()
        self._all_written = threading.Event()
        self._give_up = threading.Event()
        # The thread is a daemon: a process that dies of an exception must not wait for ranks that are gone.
        self._thread = threading.Thread(
            target=self._run, args=(image,), name="zerotrain-checkpoint", daemon=True
        )
        self.stall_seconds = time.monotonic() - started
        """Seconds that the caller was blocked by the copy."""
        atexit.register(self._at_exit)
        self._thread.start()

    def record_stages(self, stages: Sequence[int]) -> bool:
        """Record every rank's stage, as exchanged; return whether `finish` or `settle` is due."""
        if all(stage != SaveStage.WRITING for stage in stages):
            self._all_written.set()
        return SaveStage.FAILED in stages or self.is_durable(stages)

    @staticmethod
    def is_durable(stages: Sequence[int]) -> bool:
        """Return whether rank 0 has committed."""
        return stages[0] == SaveStage.DURABLE

    def expected_result(self) -> SaveResult:
        """Return the result to expect when all goes well."""
        return SaveResult(
            path=self.folder.final,
            step=self.folder.step,
            time=0.0,
            num_bytes=self.num_bytes,
            seconds=0.0,
            stall_seconds=self.stall_seconds,
            durable=False,
        )

    def settle(self) -> SaveResult:
        """Return the result after rank 0 has reported DURABLE. No collective."""
        self._thread.join()
        atexit.unregister(self._at_exit)
        return replace(
            self.expected_result(),
            time=self._durable_at or time.time(),
            seconds=self._seconds,
            removed=self._removed,
            durable=True,
        )

    def finish(self) -> SaveResult:
        """Wait for all ranks and the commit. Collective. Raises the same error on every rank."""
        self._is_written.wait()
        try:
            self._agree(self._written)
            self._all_written.set()
            if self._group.rank == 0:
                self._thread.join()
            self._agree(self._committed)
        except CheckpointError:
            self._give_up.set()
            self._thread.join()
            atexit.unregister(self._at_exit)
            if self._group.rank == 0:
                self.folder.discard()
            raise
        return self.settle()

    def _agree(self, outcome: Outcome) -> None:
        outcome.bytes_needed = self.num_bytes
        agree(self._group, self.folder.directory, outcome)

    def _run(self, image: Image) -> None:
        self._written = Outcome.of(
            lambda: self.folder.write_file(image.rank, image.tensors, image.rng),
            self.folder.directory,
            catch=Exception,
        )
        is_written = self._written.succeeded
        self.stage = SaveStage.WRITTEN if is_written else SaveStage.FAILED
        self._seconds = time.monotonic() - self._started
        self._is_written.set()
        if not is_written or self._group.rank != 0:
            return
        self._committed = self._outcome_of_commit(image)
        self._seconds = time.monotonic() - self._started
        if self._committed.succeeded:
            self._durable_at = time.time()
            if self._keep_last is not None:
                self._removed = retain(self.folder.directory, keep_last=self._keep_last)
            self.stage = SaveStage.DURABLE
        else:
            self.stage = SaveStage.FAILED

    def _outcome_of_commit(self, image: Image) -> Outcome:
        def commit() -> None:
            self._await_files()
            self.folder.commit(lambda files: image.manifest(files, self.folder))

        return Outcome.of(commit, self.folder.directory, catch=Exception)

    def _await_files(self) -> None:
        """Wait until every rank's side record is there, or it is clear that one will not come."""
        missing = list(range(self.folder.world_size))
        deadline = float("inf")
        while missing := [rank for rank in missing if not self.folder.is_written(rank)]:
            if self._all_written.is_set():
                deadline = min(deadline, time.monotonic() + VISIBLE_SECONDS)
            if self._give_up.wait(POLL_SECONDS) or time.monotonic() > deadline:
                return  # the commit names the rank whose file is missing

    def _at_exit(self) -> None:
        """Let the checkpoint become durable in a process that ends without `close`, within EXIT_SECONDS."""
        self._is_written.wait()
        self._thread.join(EXIT_SECONDS)
