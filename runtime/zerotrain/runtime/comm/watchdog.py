"""Finds out, while a collective hangs, which rank is not in it; called by `group.py`.

A thread writes to the group's store how many collectives this rank has started and which the last ones were:
every few seconds, and soon when the rank waits for long, or ends. Once a collective has been waited for two
seconds, it compares (`judge`): a rank that started another collective under the same number, that raised or
ended, or whose data ended can never meet this one, which is an error at once; a rank that has started fewer
may only be slow, which becomes an error when the bound has passed. The main thread raises it in its wait; on
CUDA, where waits do not block the host, the group is aborted and the next wait raises.
"""

from __future__ import annotations

import atexit
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

from zerotrain.runtime.comm.errors import CommError
from zerotrain.runtime.comm.judge import ENDED, Progress, certain, judge
from zerotrain.runtime.comm.notes import Notes

KEPT = 64
"""Collectives that a rank remembers."""

PATIENCE_SHARE = 0.1
"""Part of the bound that a rank waits before it compares."""

MAX_PATIENCE_S = 2.0
"""And at most so long: what is certain need not wait for a bound, which is for ranks that may be slow."""

SHOWN = 300
"""Characters of another rank's error that are passed on."""

LONGEST_SILENCE_S = 5.0
"""Between two writes of a rank that goes on, at most."""

TICK_S = 0.5
"""Between two looks of the thread."""

RANKS_PER_TICK_S = 200.0
"""Of more ranks, those that wait read the others' progress less often."""


class Watchdog:
    """One per `Comm` of several ranks."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        bound_seconds: float,
        device: torch.device | None = None,
        on_verdict: Callable[[str], None] | None = None,
    ) -> None:
        """`store` is a c10d store of its own; `device` is the rank's; `on_verdict` is called in the thread,
        where waits do not block the host."""
        self._rank = rank
        self._world_size = world_size
        self._bound = bound_seconds
        self._device = device
        self._patience = min(bound_seconds * PATIENCE_SHARE, MAX_PATIENCE_S)
        every = min(max(bound_seconds * PATIENCE_SHARE / 2, 0.05), LONGEST_SILENCE_S)
        self._notes = Notes(store, rank=rank, world_size=world_size, every=every)
        self._on_verdict = on_verdict
        self._recent: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._started = 0
        self._waiting: tuple[int, float] | None = None
        self._on_device: deque[tuple[int, float, Any]] = deque()
        self.advice = ""
        """What may be the reason where ranks part, after a semicolon; it ends every error."""
        self._verdict: str | None = None
        self._compared_at = 0.0
        self.batches: tuple[int, int, bool] | None = None
        """As of `Progress`; the engine's loader sets it."""
        self._error = self._end = ""
        self._process = os.getpid()
        _OPEN.add(self)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerotrain-watchdog", daemon=True)
        self._thread.start()

    @property
    def is_host(self) -> bool:
        """Whether waits block the host."""
        return self._on_verdict is None

    def start(self, what: str, work: Any) -> int:
        """A collective was issued; its number."""
        self._started += 1
        self._recent.append((self._started, what))
        if not self.is_host:
            # A handle keeps the collective's result alive, so it goes as soon as it is over.
            while self._on_device and self._on_device[0][2].is_completed():
                self._on_device.popleft()
            self._on_device.append((self._started, time.monotonic(), work))
        return self._started

    def enter(self, number: int) -> None:
        """The rank waits for a collective from now on."""
        self._waiting = (number, time.monotonic())

    def leave(self) -> None:
        """It does not any more."""
        self._waiting = None

    @property
    def waiting_seconds(self) -> float:
        """How long the rank has been in the collective that it waits for; 0 when it does something else."""
        waiting = self._waiting
        return 0.0 if waiting is None else time.monotonic() - waiting[1]

    @property
    def has_verdict(self) -> bool:
        """Whether `check` raises."""
        return self._verdict is not None

    def check(self) -> None:
        """Raise CommError when the wait that runs cannot end well."""
        if self._verdict is not None:
            raise CommError(self._verdict + self.advice)

    def note_error(self, error: BaseException) -> None:
        """The rank met an error in a call of the engine, which the program may still handle: said of it if
        the rank is missing later."""
        self._error = _described(error)

    def end(self, what: str) -> None:
        """Tell the other ranks that this one takes part in no further collective, and why."""
        if not self._end and os.getpid() == self._process:  # a forked process is not the rank
            self._end = what
            with suppress(RuntimeError, OSError, ValueError):
                self._notes.publish(self._progress())

    def close(self) -> None:
        """End the thread, and tell the others."""
        _OPEN.discard(self)
        self._stop.set()
        self._thread.join(timeout=5)
        self.end("closed its engine")

    def explain(self, *, seconds: float = 0.0) -> str | None:
        """Why the collective that this rank waits for failed, as far as the other ranks have told or their
        processes ended; looks for so long."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(RuntimeError, OSError, ValueError):
                found = certain(self._progress(), self._notes.of_others(), rank=self._rank)
                if found is not None:
                    return found
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # A thread begins with the first GPU, where asking for a collective's end would take memory.
            torch.cuda.set_device(self._device)
        while not self._stop.wait(min(max(self._patience / 2, 0.05), TICK_S)):
            # The store goes with rank 0; the collective then fails by itself.
            with suppress(RuntimeError, OSError, ValueError):
                self._look()

    def _look(self) -> None:
        if not self.is_host:
            pending = (
                (number, since) for number, since, work in list(self._on_device) if not work.is_completed()
            )
            self._waiting = next(pending, None)
        # Only what changed is written, and the others are read only from within a long wait.
        mine, waiting, now = self._progress(), self._waiting, time.monotonic()
        waited = 0.0 if waiting is None else now - waiting[1]
        self._notes.keep_up(mine, is_urgent=waited >= self._patience / 2)
        if waiting is None or self._verdict is not None or waited < self._patience:
            return
        if now - self._compared_at < self._world_size / RANKS_PER_TICK_S:
            return
        self._compared_at = now
        others = self._notes.of_others()
        verdict = judge(mine, others, rank=self._rank, waited=waited, bound=self._bound)
        if verdict is not None and self._waiting == waiting:
            self._verdict = verdict
            if self._on_verdict is not None:
                print(verdict, file=sys.stderr, flush=True)
                self._on_verdict(verdict)

    def _progress(self) -> Progress:
        waiting = self._waiting
        return Progress(
            started=self._started,
            recent=dict(tuple(self._recent)),
            waiting_for=None if waiting is None else waiting[0],
            end=self._end,
            error=self._error,
            batches=self.batches,
        )


def own_store(prefix: str) -> Any:
    """The default group's store over a connection of its own, so that a blocked main thread holds nothing."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    with suppress(RuntimeError, AttributeError):  # kinds of stores that have no connection; older torch
        store = store.clone()
    return c10d.PrefixStore(prefix, store)


_OPEN: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Of this process."""


def _described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:SHOWN]}" if lines else type(error).__name__


def _tell_of_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """The interpreter's hook for an exception that ends the program: the other ranks hear of it before the
    process is gone, then the hook that was there before does its work."""
    for watchdog in list(_OPEN):
        watchdog.end(f"raised {_described(error)}")
    _hook_before(kind, error, trace)


def _tell_of_exit() -> None:
    for watchdog in list(_OPEN):
        watchdog.end(ENDED)


_hook_before = sys.excepthook
sys.excepthook = _tell_of_exception
atexit.register(_tell_of_exit)
