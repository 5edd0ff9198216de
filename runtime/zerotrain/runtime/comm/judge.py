"""What the progress of all ranks says about a collective that does not end. Pure; called by `watchdog.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from zerotrain.contract.strict_json import strict_json

CALL = "call of "
"""Begins the names of collectives that are calls of the engine as a whole, such as `call of
save_checkpoint`."""

ENDED = "ended"
"""Of `Progress.end`, where nothing more is known."""

STUCK_BOUNDS = 2.0
"""Bounds after which a collective that nobody is missing from is reported; by then even a rank that came at
the last moment has been in it for one bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a rank is."""

    started: int
    """Collectives so far."""
    recent: Mapping[int, str] = field(default_factory=dict)
    """The last of them by number, such as `all_gather for 'blocks.3'`."""
    waiting_for: int | None = None
    """Number of the collective that the rank waits for now."""
    end: str = ""
    """Why the rank takes part in nothing more, such as `raised ValueError: ...`; empty while it may."""
    error: str = ""
    """The last error that came out of a call of the engine; the program may have handled it."""
    batches: tuple[int, int, bool] | None = None
    """Epoch of the engine's own loader, batches of it so far, whether it has ended; None without one."""

    def to_json(self) -> str:
        return json.dumps(
            [
                self.started,
                list(self.recent.items()),
                self.waiting_for,
                self.end,
                self.error,
                self.batches,
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Progress:
        started, recent, waiting_for, end, error, batches = strict_json(text)
        return cls(
            started=started,
            recent=dict(recent),
            waiting_for=waiting_for,
            end=end,
            error=error,
            batches=None if batches is None else tuple(batches),
        )

    @property
    def last(self) -> str:
        found = self.recent.get(self.started)
        return "has not started any collective" if found is None else f"last started {found}"


NOTHING = Progress(started=0)
"""Of a rank that has not said anything yet."""


def judge(
    mine: Progress, others: Mapping[int, Progress], *, rank: int, waited: float, bound: float
) -> str | None:
    """What is wrong with the collective that this rank waits for; None when it may still go through."""
    number = mine.waiting_for
    if number is None:
        return None
    intro = f"{_name(mine, number)} on rank {rank} has waited {waited:.0f} s"
    if (known := certain(mine, others, rank=rank)) is not None:
        return f"{intro} and cannot end: {known}"
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


def certain(mine: Progress, others: Mapping[int, Progress], *, rank: int) -> str | None:
    """Why the collective that this rank waits for can never go through, however long it waits; None where
    the others may only be late."""
    number = mine.waiting_for
    for peer, theirs in others.items():
        for shared in sorted(mine.recent.keys() & theirs.recent.keys()):
            if mine.recent[shared] != theirs.recent[shared]:
                return _different(shared, (rank, mine.recent[shared]), (peer, theirs.recent[shared]))
    if number is None:
        return None
    missing = {peer: theirs for peer, theirs in others.items() if theirs.started < number}
    for peer, theirs in missing.items():
        if theirs.end:
            before = f" (its last error: {theirs.error})" if theirs.error and ":" not in theirs.end else ""
            how = "" if theirs.end == ENDED else f" {theirs.end}"
            return f"another rank ended or left: rank {peer}{how}{before}"
    for peer, theirs in missing.items():
        if theirs.waiting_for is None and (text := _fewer_batches((rank, mine), (peer, theirs))):
            return text
    return None


def _fewer_batches(mine: tuple[int, Progress], theirs: tuple[int, Progress]) -> str | None:
    """Whether their loader has ended before the batch that this rank works on, in words."""
    (rank, own), (peer, other) = mine, theirs
    if own.batches is None or other.batches is None:
        return None
    (own_epoch, own_given, own_ended), (epoch, given, ended) = own.batches, other.batches
    if not ended or own_ended or epoch != own_epoch or given >= own_given:
        return None
    return (
        f"rank {peer}'s loader ended after {given} batches of epoch {epoch}, and rank {rank} is at batch "
        f"{own_given}; give every rank as many batches (training_data must have the same length on every "
        'rank), or set uneven_inputs to "join"'
    )


def _different(number: int, mine: tuple[int, str], theirs: tuple[int, str]) -> str:
    """The ranks are in different collectives of one number."""
    calls = [name.removeprefix(CALL) for _, name in (theirs, mine) if name.startswith(CALL)]
    if not calls:
        return (
            f"as collective {number} rank {theirs[0]} started {theirs[1]}, rank {mine[0]} {mine[1]}; the "
            "model must call the same modules in the same order on every rank"
        )
    return (
        f"rank {theirs[0]} {_done(theirs[1])} while rank {mine[0]} {_done(mine[1])}; "
        f"call {calls[0]}() on every rank, after the same step"
    )


def _done(name: str) -> str:
    return f"called {name.removeprefix(CALL)}()" if name.startswith(CALL) else f"started {name}"


def _name(mine: Progress, number: int) -> str:
    return mine.recent.get(number, f"collective {number}").removeprefix(CALL)
