"""The package's error, and what is wrong with a collective that does not end: pure functions of the progress
of all ranks, called by `watchdog.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zerotrain.contract.strict_json import strict_json

CALL = "call of "
"""Prefix of the names of collectives that are whole calls of the engine, such as `call of
save_checkpoint`."""

ENDED = "ended"
"""Value of `Progress.end` if only the end of the rank is known."""

STORE_GONE = "the process that hosts the store of the group, which is rank 0 unless a launcher hosts it"
"""The rank that has ended where the store cannot be reached any more."""

STUCK_BOUNDS = 2.0
"""Multiple of the bound after which a collective that every rank has entered is reported. By then even the
last rank has been in it for one bound."""


class CommError(RuntimeError):
    """The process group cannot be set up, the ranks disagree on what they do, or a rank is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of one rank."""

    started: int
    """Number of collectives started."""
    recent: Mapping[int, str] = field(default_factory=dict)
    """Names of the last collectives by number, such as `all_gather for 'blocks.3'`."""
    waiting_for: int | None = None
    """Number of the collective that the rank waits for now."""
    end: str = ""
    """Reason why the rank takes part in no more collectives, such as `raised ValueError: ...`; empty while it
    may."""
    error: str = ""
    """Last error that a call of the engine raised; the program may have handled it."""
    batches: tuple[int, int, bool] | None = None
    """Epoch of the engine's own loader, its batches so far and whether it has ended; None without one."""
    thread: int = 0
    """Thread that started the last collective; 0 before the first."""

    def to_json(self) -> str:
        return json.dumps(
            [
                self.started,
                list(self.recent.items()),
                self.waiting_for,
                self.end,
                self.error,
                self.batches,
                self.thread,
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Progress:
        started, recent, waiting_for, end, error, batches, thread = strict_json(text)
        return cls(
            started=started,
            recent=dict(recent),
            waiting_for=waiting_for,
            end=end,
            error=error,
            batches=None if batches is None else tuple(batches),
            thread=thread,
        )

    @property
    def last(self) -> str:
        found = self.recent.get(self.started)
        return "has not started any collective" if found is None else f"last started {found}"


NOTHING = Progress(started=0)
"""Progress of a rank that has not written any yet."""


def diagnose(
    mine: Progress,
    others: Mapping[int, Progress],
    *,
    rank: int,
    waited: float,
    bound: float,
    elsewhere: str | None = None,
) -> str | None:
    """Return what is wrong with the collective that this rank waits for; None if it may still succeed.
    `elsewhere` is what `waits_elsewhere` found."""
    number = mine.waiting_for
    if number is None:
        return None
    intro = f"{_name(mine, number)} on rank {rank} has waited {waited:.0f} s"
    if (known := certain_failure(mine, others, rank=rank) or elsewhere) is not None:
        return f"{intro} and cannot end: {known}"
    if waited < bound:
        return None
    missing = {peer: theirs for peer, theirs in others.items() if theirs.started < number}
    # A rank that is itself waiting is blocked by another one.
    culprits = {peer: theirs for peer, theirs in missing.items() if theirs.waiting_for is None} or missing
    if not culprits:
        if waited < bound * STUCK_BOUNDS:
            return None
        return (
            f"{intro} although every rank has started it: the ranks send different data (such as different "
            "parameters of one module), or the network does not deliver it"
        )
    named = "; ".join(f"rank {peer} {theirs.last}" for peer, theirs in culprits.items())
    return (
        f"{intro} for ranks {sorted(culprits)}, which are doing something else ({named}); "
        "raise ZEROTRAIN_WATCHDOG_SECONDS if that is meant to take so long"
    )


def certain_failure(mine: Progress, others: Mapping[int, Progress], *, rank: int) -> str | None:
    """Return why the collective that this rank waits for can never succeed; None if the other ranks may only
    be late."""
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


def waits_elsewhere(
    mine: Progress,
    others: Mapping[int, Progress],
    *,
    rank: int,
    here: Progress,
    there: Mapping[int, Progress],
) -> str | None:
    """Return why the collective that this rank waits for can never succeed: a rank that is missing from it
    waits for this one in another engine; None if there is no such rank.

    `here` and `there` are the progress of this rank and the others in that engine. Engines that different
    threads use are left alone: one thread may wait while another goes on.
    """
    number = mine.waiting_for
    if number is None or here.thread not in (0, mine.thread):
        return None
    for peer, theirs in there.items():
        awaited, missing = theirs.waiting_for, others.get(peer, NOTHING)
        if awaited is None or awaited <= here.started or missing.started >= number:
            continue
        if missing.thread not in (0, theirs.thread):
            continue
        names = (peer, theirs.recent.get(awaited, "a collective")), (rank, mine.recent.get(number, ""))
        if any(name.startswith(CALL) for _, name in names):
            return _different(number, names[1], names[0])
        return (
            f"rank {peer} waits in another engine, in {names[0][1]}, while rank {rank} started {names[1][1]};"
            " use the engines of the program in the same order and equally often on every rank"
        )
    return None


def different_calls(rank: int, names: Sequence[str]) -> str:
    """Return the error text for ranks that made different calls of the engine; `names` in rank order, without
    `CALL`."""
    peer = next(other for other, name in enumerate(names) if name != names[rank])
    return _different(0, (rank, f"{CALL}{names[rank]}"), (peer, f"{CALL}{names[peer]}"))


def _fewer_batches(mine: tuple[int, Progress], theirs: tuple[int, Progress]) -> str | None:
    """Return the error text if the peer's loader ended before the batch that this rank works on, else
    None."""
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
    """Return the error text for ranks that started different collectives under one number."""
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
