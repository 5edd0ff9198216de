"""Finds the rank that is missing from a collective that hangs; used by `group.py`.

A thread writes to the group's store how many collectives this rank has started and the names of the last
ones: every few seconds, and earlier when the rank waits for long, or ends. Once a collective has been waited
for two seconds (less with a short bound), it compares (`diagnose`). A rank that started another collective
under the same number, that raised or ended, or whose data ended can never join this one, which is an error at
once. A rank that has started fewer may only be slow, which becomes an error when the bound has passed. The
main thread raises the error in its wait. On CUDA, where waits do not block the host, the group is aborted and
the next wait raises.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.mismatch import (
    ENDED,
    STORE_GONE,
    CommError,
    Progress,
    certain_failure,
    diagnose,
    waits_elsewhere,
)
from zerotrain.runtime.comm.rank_records import RankRecords

KEPT = 64
"""Number of recent collectives that a rank remembers."""

PATIENCE_SHARE = 0.1
"""Fraction of the bound that a rank waits before it compares."""

MAX_PATIENCE_S = 2.0
"""Longest wait in seconds before a rank compares. A certain error need not wait for the bound, which is for
ranks that may only be slow."""

SHOWN = 300
"""Characters of a rank's error that are passed on to other ranks."""

LONGEST_SILENCE_S = 5.0
"""Longest time in seconds between two writes while a rank makes progress."""

TICK_S = 0.5
"""Seconds between two checks of the thread."""

RANKS_PER_TICK_S = 200.0
"""Ranks whose progress a waiting rank reads per second, at most; it reads larger groups less often."""

THREAD_LOCAL = 1
"""The driver's CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads are no concern of this one."""


class Watchdog:
    """Watchdog of one `Comm` with several ranks."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        bound_seconds: float,
        ranks: tuple[int, ...] = (),
        processes: Any = None,
        device: torch.device | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Start the thread.

        `store` is a c10d store for this watchdog alone, `processes` the one of `announce_process` (None: the
        same); `ranks` are the global ranks of the group (empty: all), `device` is the rank's. `on_failure` is
        given if waits do not block the host, and is called in the thread.
        """
        self._rank = rank
        self._ranks = ranks or tuple(range(world_size))
        self._world_size = world_size
        self._bound = bound_seconds
        self._device = device
        self._patience = min(bound_seconds * PATIENCE_SHARE, MAX_PATIENCE_S)
        every = min(max(bound_seconds * PATIENCE_SHARE / 2, 0.05), LONGEST_SILENCE_S)
        self._records = RankRecords(store, processes or store, rank=rank, ranks=self._ranks, every=every)
        self._on_failure = on_failure
        self._recent: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._started = self._thread_id = 0
        self._waiting: tuple[int, float] | None = None
        self._on_device: dict[int, tuple[float, Callable[[], bool]]] = {}
        """Collectives that the device may not have passed yet, in order of their numbers: when each was
        issued, and a function that tells whether it is over."""
        self.advice = ""
        """Text that ends every error: a semicolon and the possible reason why ranks diverge."""
        self._failure: str | None = None
        self._compared_at = 0.0
        self.batches: tuple[int, int, bool] | None = None
        """Progress of the engine's loader, which sets it; see `Progress.batches`."""
        self._error = self._end = ""
        self._process = os.getpid()
        _OPEN.add(self)
        _watch_end_of_child()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerotrain-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_host(self) -> bool:
        """Whether waits block the host."""
        return self._on_failure is None

    def start(self, what: str, work: Any) -> int:
        """Record that a collective was issued, and return its number."""
        self._started += 1
        self._thread_id = threading.get_ident()
        self._recent.append((self._started, what))
        if not self.is_host:
            self._drop_completed()
            self._on_device[self._started] = (time.monotonic(), work.is_completed)
        return self._started

    def waited(self, number: int, is_completed: Callable[[], bool]) -> None:
        """Ask `is_completed` from now on whether the collective is over, whose stream waits for it now.

        A handle of NCCL keeps the collective's result alive. The host may be a whole pass ahead of the
        device, and the handles would then keep the gradients that every unit has received.
        """
        found = self._on_device.get(number)
        if found is not None:
            self._on_device[number] = (found[0], is_completed)

    def _drop_completed(self) -> None:
        for number, (_, is_completed) in list(self._on_device.items()):
            if not is_completed():
                return
            del self._on_device[number]

    def enter(self, number: int) -> None:
        """Record that the rank waits for a collective from now on."""
        self._waiting = (number, time.monotonic())

    def leave(self) -> None:
        """Record that the rank waits no more."""
        self._waiting = None

    @property
    def waiting_seconds(self) -> float:
        """Seconds that the rank has waited in its current collective; 0 if it is not waiting."""
        waiting = self._waiting
        return 0.0 if waiting is None else time.monotonic() - waiting[1]

    @property
    def has_failed(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    def check(self) -> None:
        """Raise CommError if the current wait cannot succeed."""
        if self._failure is not None:
            raise CommError(self._failure + self.advice)

    def note_error(self, error: BaseException) -> None:
        """Record an error of an engine call, which the program may still handle. Other ranks report it if
        this rank is missing later."""
        if not self._end:
            self._error = _described(error)
            # At once: the program may end without another chance, by os._exit().
            with suppress(RuntimeError, OSError, ValueError):
                self._records.publish(self._progress())

    def end(self, what: str) -> None:
        """Publish that this rank takes part in no further collective, and why."""
        if not self._end and os.getpid() == self._process:  # a forked process is not this rank
            self._end = what
            with suppress(RuntimeError, OSError, ValueError):
                self._records.publish(self._progress())

    def close(self) -> None:
        """End the thread, and publish that this rank has closed its engine."""
        _OPEN.discard(self)
        self._stop.set()
        self._thread.join(timeout=5)
        self.end("closed its engine")

    def explain(self, *, seconds: float = 0.0) -> str | None:
        """Return why the collective that this rank waits for failed, from the other ranks' progress and
        processes.

        Looks for a reason for up to `seconds`; None if there is none.
        """
        deadline = time.monotonic() + seconds
        while True:
            unknown, others = None, self._records.last_seen
            try:
                others = self._records.of_others()
            except dist.DistNetworkError:
                unknown = f"another rank ended or left: {STORE_GONE}"
            except (RuntimeError, OSError, ValueError):
                pass
            found = certain_failure(self._progress(), others, rank=self._rank)
            if found is not None:
                return found
            if unknown is not None or time.monotonic() >= deadline:
                return unknown
            time.sleep(0.1)

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # A new thread uses the first GPU, where querying a collective would allocate memory.
            torch.cuda.set_device(self._device)
            _leave_captures_alone()
        while not self._stop.wait(min(max(self._patience / 2, 0.05), TICK_S)):
            # The store ends with rank 0; the collective then fails by itself.
            with suppress(RuntimeError, OSError, ValueError):
                self._look()

    def _look(self) -> None:
        if not self.is_host:
            pending = (
                (number, since)
                for number, (since, is_completed) in list(self._on_device.items())
                if not is_completed()
            )
            self._waiting = next(pending, None)
        # Write only what changed, and read the others only during a long wait.
        mine, waiting, now = self._progress(), self._waiting, time.monotonic()
        waited = 0.0 if waiting is None else now - waiting[1]
        self._records.keep_up(mine, is_urgent=waited >= self._patience / 2)
        if waiting is None or self._failure is not None or waited < self._patience:
            return
        if now - self._compared_at < self._world_size / RANKS_PER_TICK_S:
            return
        self._compared_at = now
        others = self._records.of_others()
        failure = diagnose(
            mine,
            others,
            rank=self._rank,
            waited=waited,
            bound=self._bound,
            elsewhere=self._waits_elsewhere(mine, others),
        )
        if failure is not None and self._waiting == waiting:
            self._failure = failure
            if self._on_failure is not None:
                print(failure, file=sys.stderr, flush=True)
                self._on_failure(failure)

    def _waits_elsewhere(self, mine: Progress, others: dict[int, Progress]) -> str | None:
        """Return what `waits_elsewhere` finds in the program's other engines of the same ranks."""
        if not self.is_host:  # the host may still come, whatever the device waits for
            return None
        for other in list(_OPEN):
            if other is self or other._ranks != self._ranks:
                continue
            there = other._records.of_others()
            found = waits_elsewhere(mine, others, rank=self._rank, here=other._progress(), there=there)
            if found is not None:
                return found
        return None

    def _progress(self) -> Progress:
        waiting = self._waiting
        return Progress(
            started=self._started,
            recent=dict(tuple(self._recent)),
            waiting_for=None if waiting is None else waiting[0],
            end=self._end,
            error=self._error,
            batches=self.batches,
            thread=self._thread_id,
        )


def check_group() -> None:
    """Raise CommError where the script has destroyed the default group."""
    if not dist.is_initialized():
        raise CommError(
            "the process group of the ranks was destroyed (torch.distributed.destroy_process_group()) while "
            "an engine is open; call engine.close() on every rank before"
        )


def own_store(prefix: str) -> Any:
    """Return the default group's store over a connection of its own, so that a blocked main thread blocks
    nothing. Raises CommError where there is no store any more."""
    c10d: Any = dist.distributed_c10d
    check_group()
    store = c10d._get_default_store()
    try:
        store.check(["zerotrain"])  # a new connection would be tried for the group's whole timeout
    except dist.DistNetworkError as error:
        raise CommError(f"another rank ended or left: {STORE_GONE}") from error
    with suppress(RuntimeError, AttributeError):  # some kinds of stores, and older torch, cannot clone
        store = store.clone()
    return c10d.PrefixStore(prefix, store)


def _leave_captures_alone() -> None:
    """Let this thread ask for events while another one captures a CUDA graph; by default that would make the
    capture invalid."""
    mode = ctypes.c_int(THREAD_LOCAL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_OPEN: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Open watchdogs of this process."""


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:SHOWN]}" if lines else type(error).__name__


def _publish_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Publish an exception that ends the program before the process is gone, then call the previous
    `sys.excepthook`."""
    for watchdog in list(_OPEN):
        watchdog.end(f"raised {_described(error)}")
    _hook_before(kind, error, trace)


def _publish_exit() -> None:
    for watchdog in list(_OPEN):
        watchdog.end(ENDED)


def _watch_end_of_child() -> None:
    """Publish the end of a process that `multiprocessing` started: it runs neither `sys.excepthook` nor
    `atexit`."""
    if multiprocessing.parent_process() is not None and os.getpid() not in _WATCHED_CHILDREN:
        _WATCHED_CHILDREN.add(os.getpid())
        multiprocessing.util.Finalize(None, _publish_end_of_child, exitpriority=0)


def _publish_end_of_child() -> None:
    error = sys.exc_info()[1]  # the child's, which is being raised here
    if isinstance(error, SystemExit):
        error = error.__context__  # torch.multiprocessing.spawn handles the error by sys.exit()
    for watchdog in list(_OPEN):
        watchdog.end(ENDED if error is None else f"raised {_described(error)}")


_WATCHED_CHILDREN: set[int] = set()
"""Processes that have registered `_publish_end_of_child`: this one, and those that it was forked from."""

_hook_before = sys.excepthook
sys.excepthook = _publish_exception
atexit.register(_publish_exit)
