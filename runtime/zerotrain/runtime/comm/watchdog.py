"""Finds out, while a collective hangs, which rank is not in it; called by `group.py`.

A thread writes to the group's store, every few seconds at most, how many collectives this rank has started
and which the last ones were. Once a collective has been waited for too long, it compares: a rank that started
another collective under the same number can never meet this one, which is an error soon; a rank that has
started fewer may only be slow, which becomes an error when the bound has passed. The main thread raises it in
its wait; on CUDA, where waits do not block the host, the group is aborted and the next wait raises. Nothing
of this touches the store while collectives go through.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.comm.errors import CommError

KEPT = 64
"""Collectives that a rank remembers."""

MISMATCH_SHARE = 0.1
"""Part of the bound after which ranks that can never meet are reported."""

MAX_MISMATCH_S = 60.0
"""And at most so late: no bound, which is for ranks that may be slow, makes such ranks meet."""

STUCK_BOUNDS = 2.0
"""Bounds after which a collective that nobody is missing from is reported; by then even a rank that came at
the last moment has been in it for one bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a rank is."""

    started: int
    """Collectives so far."""
    recent: Mapping[int, str]
    """The last of them by number, such as `all_gather for 'blocks.3'`."""
    waiting_for: int | None
    """Number of the collective that the rank waits for now."""

    def to_json(self) -> str:
        return json.dumps([self.started, list(self.recent.items()), self.waiting_for])

    @classmethod
    def from_json(cls, text: str) -> Progress:
        started, recent, waiting_for = strict_json(text)
        return cls(started=started, recent=dict(recent), waiting_for=waiting_for)

    @property
    def last(self) -> str:
        found = self.recent.get(self.started)
        return "has not started any collective" if found is None else f"last started {found}"


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
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bound = bound_seconds
        self._device = device
        self._patience = min(bound_seconds * MISMATCH_SHARE, MAX_MISMATCH_S)
        self._on_verdict = on_verdict
        self._recent: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._started = 0
        self._waiting: tuple[int, float] | None = None
        self._on_device: deque[tuple[int, float, Any]] = deque()
        self._verdict: str | None = None
        self._published = ""
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

    def check(self) -> None:
        """Raise CommError when the wait that runs cannot end well."""
        if self._verdict is not None:
            raise CommError(self._verdict)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    @property
    def _interval(self) -> float:
        return min(max(self._patience / 2, 0.05), 5.0)

    def _run(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            # A thread begins with the first GPU, where asking for a collective's end would take memory.
            torch.cuda.set_device(self._device)
        while not self._stop.wait(self._interval):
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
        mine = self._progress()
        text = mine.to_json()
        if text != self._published:
            self._store.set(_key(self._rank), text)
            self._published = text
        waiting = self._waiting
        if waiting is None or self._verdict is not None:
            return
        waited = time.monotonic() - waiting[1]
        if waited < self._patience:
            return
        verdict = judge(mine, self._others(), rank=self._rank, waited=waited, bound=self._bound)
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
        )

    def _others(self) -> dict[int, Progress]:
        found = {}
        for rank in range(self._world_size):
            if rank != self._rank and self._store.check([_key(rank)]):
                found[rank] = Progress.from_json(self._store.get(_key(rank)).decode())
        return found


def judge(
    mine: Progress, others: Mapping[int, Progress], *, rank: int, waited: float, bound: float
) -> str | None:
    """What is wrong with the collective that this rank waits for; None when it may still go through."""
    number = mine.waiting_for
    if number is None:
        return None
    what = mine.recent.get(number, f"collective {number}")
    intro = f"{what} on rank {rank} has waited {waited:.0f} s"
    for peer, theirs in others.items():
        for shared in sorted(mine.recent.keys() & theirs.recent.keys()):
            if mine.recent[shared] != theirs.recent[shared]:
                return (
                    f"{intro} and cannot end: as collective {shared} rank {peer} started "
                    f"{theirs.recent[shared]}, rank {rank} {mine.recent[shared]}; the model must call the "
                    "same modules in the same order on every rank"
                )
    if waited < bound:
        return None
    missing = {peer: theirs for peer, theirs in others.items() if theirs.started < number}
    # A rank that is itself in a wait is held up by another one.
    culprits = {peer: theirs for peer, theirs in missing.items() if theirs.waiting_for is None} or missing
    if not culprits:
        if waited < bound * STUCK_BOUNDS:
            return None
        return (
            f"{intro} although every rank is in it or past it: the ranks do not mean the same data (such as "
            "different parameters of one module), or the network does not carry it"
        )
    named = "; ".join(f"rank {peer} {theirs.last}" for peer, theirs in culprits.items())
    return (
        f"{intro} for ranks {sorted(culprits)}, which are doing something else ({named}); "
        "raise ZEROTRAIN_WATCHDOG_SECONDS if that is meant to take so long"
    )


def own_store(prefix: str) -> Any:
    """The default group's store over a connection of its own, so that a blocked main thread holds nothing."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    with suppress(RuntimeError, AttributeError):  # kinds of stores that have no connection; older torch
        store = store.clone()
    return c10d.PrefixStore(prefix, store)


def _key(rank: int) -> str:
    return f"zerotrain-watchdog/{rank}"
