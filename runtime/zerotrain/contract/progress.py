"""What a rank tells the launcher, and the launcher the operator: progress and the termination message.

Both travel as one JSON object. Readers ignore keys they do not know, so that an operator can be older
or newer than the image a job runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from zerotrain.contract.strict_json import JsonError, strict_json
from zerotrain.contract.text import cut, is_printable, one_line

MAX_TERMINATION_BYTES = 2048
"""kubelet keeps 4096 bytes of a container's termination message, and of a pod's 12 KiB in equal parts for all
its containers: so many where service meshes and the like have put in five more."""

MAX_RANKS = 64
"""Of one worker: what the API allows."""

MAX_RANK_ENDS = MAX_RANKS
"""Further ranks that a termination message names."""

MAX_REASON_CHARS = 160
"""Of what one of them says."""

MAX_REJECTED = 20
"""Damaged checkpoints that are read of a record: the newest, which stand first."""

MAX_PATH_CHARS = 1024
"""Of a checkpoint's folder. It goes into the job's status, where each character may take twelve bytes. A
path that was cut would be another one, so a longer one is refused; one with control characters is left
out."""

MAX_TEXT_CHARS = 2000
"""Of any other text; a longer one loses its middle."""

T = TypeVar("T")


class Phase(StrEnum):
    """What a rank is doing; hang limits differ per phase."""

    INIT = "init"
    """Process start, imports, building the model, loading a checkpoint."""
    RENDEZVOUS = "rendezvous"
    FIRST_STEP = "first_step"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    DONE = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointProgress:
    """The newest checkpoint this attempt knows to be durable (committed and synced)."""

    step: int
    path: str
    time: float
    """Unix seconds at the commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that was found damaged and passed over."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """The rank whose own work takes longest: what a step takes it without the waits for the others."""

    rank: int
    own_seconds: float
    """Median of its last steps."""
    median_seconds: float
    """The middle one of all ranks' medians."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Motion:
    """How a rank's records moved, as its launcher saw it on a clock that never jumps."""

    idle_seconds: float
    """Since the step or the phase last changed."""
    silent_seconds: float
    """Since the rank last said anything; it repeats itself every few seconds while its process runs. 0 once
    that has ended, which an older operator would take for a process that is stopped."""
    ended_seconds: float | None = None
    """Since its process ended; None while it runs, and from an older launcher."""
    steps_seen: int = 0
    """Steps of this attempt that the rest was learned from."""
    step_p99_seconds: float | None = None
    """99th percentile of the last steps, data included and checkpoints not."""
    longest_step_seconds: float | None = None
    """Longest time that this attempt's step did not move, the first step apart: of a program that reports
    every so many steps, that of so many."""
    first_step_seconds: float | None = None
    """What this attempt took in phase first_step until its first step was done, compilation and warm-up
    included; None for a program that has no such phase."""
    longest_checkpoint_seconds: float | None = None
    """Of this attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One rank's state. Times are Unix seconds of the worker's clock."""

    rank: int
    attempt: int
    phase: Phase = Phase.INIT
    step: int = 0
    """Optimizer steps done, earlier attempts included."""
    total_steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    """Of the whole job, over the last log interval."""
    step_seconds: float | None = None
    """Mean over the last log interval."""
    step_at: float = 0.0
    """When `step` last moved; 0 before the first."""
    heartbeat_at: float = 0.0
    checkpoint: CheckpointProgress | None = None
    resumed_from: int | None = None
    """Step that this attempt started from; None when it started afresh."""
    resumed_job: str | None = None
    """UID of the job that wrote that checkpoint: empty for one that no job wrote (imported, or of a local
    run), None where it is not known."""
    rejected_checkpoints: tuple[RejectedCheckpoint, ...] = ()
    """Newest first."""
    memory_peak_bytes: int = 0
    """Most that the rank had allocated on its accelerator; on CPUs its largest resident size."""
    host_peak_bytes: int = 0
    """Largest resident size of the rank's process."""
    spill_peak_bytes: int = 0
    """Most that it had spilled to disk."""
    collective_wait_seconds: float | None = None
    """How long the rank has been waiting in a collective; 0 = it does something else, None = unknown."""
    straggler: Straggler | None = None
    """The slowest rank of all; rank 0 alone says it, from the numbers that all ranks exchange at a step."""
    motion: Motion | None = None
    """Filled in by the launcher; None for a program that never reported."""

    def to_json(self) -> str:
        """Numbers that JSON has no form for (a diverged loss) become null."""
        return _dump(_plain(asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Raises ValueError when a required key is missing or not an object."""
        return cls.from_record(_object(text, "progress"))

    @classmethod
    def from_record(cls, record: object) -> Progress:
        """The same from the parsed JSON."""
        data = _known(cls, record)
        data["phase"] = Phase(data.get("phase", Phase.INIT))
        for name, kind in _PARTS.items():
            if data.get(name) is not None:
                data[name] = _build(kind, _known(kind, data[name]))
        if not isinstance(data.get("rejected_checkpoints", []), list):
            raise ValueError(
                f"Progress.rejected_checkpoints must be a list; got {_shown(data['rejected_checkpoints'])}"
            )
        data["rejected_checkpoints"] = tuple(
            _build(RejectedCheckpoint, _known(RejectedCheckpoint, item))
            for item in data.get("rejected_checkpoints", ())[:MAX_REJECTED]
        )
        return _build(cls, data)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How one rank of several that failed did so."""

    rank: int
    code: int
    """128+n for signal n."""
    reason: str = ""
    """Type and text of its exception, where it could tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Termination:
    """Why a worker ended, as its container's termination message. What is small and decides what follows
    stands first, long texts last: kubelet may cut the end off."""

    attempt: int
    code: int
    rank: int | None = None
    """First rank that failed; None when none did."""
    signal: int | None = None
    step: int = 0
    resumed_from: int | None = None
    """As in Progress, as is the next one: an attempt that had nothing left to do may end unasked."""
    resumed_job: str | None = None
    checkpoint: CheckpointProgress | None = None
    exception: str | None = None
    """Type and text of the exception that ended the rank."""
    last_line: str | None = None
    also_failed: tuple[RankEnd, ...] = ()
    """The worker's other ranks that failed, in the order of their ends."""

    def to_json(self) -> str:
        """At most MAX_TERMINATION_BYTES of UTF-8. Given up in this order, until it fits: the reasons of the
        other ranks, the middle of the culprit's texts, the checkpoint. The codes of MAX_RANK_ENDS other ranks
        always stay.
        """
        for limit, reason in _TEXT_LIMITS:
            whole = replace(
                self,
                exception=_line(self.exception, limit),
                last_line=_line(self.last_line, limit),
                also_failed=(),
            )
            text = _dump({**asdict(whole), "also_failed": _rank_ends(self.also_failed, reason)})
            if len(text.encode()) <= MAX_TERMINATION_BYTES:
                return text
        small = ("attempt", "code", "rank", "signal", "step", "resumed_from")
        bare = {name: getattr(self, name) for name in small}
        return _dump({**bare, "also_failed": _rank_ends(self.also_failed, 0)})

    @classmethod
    def from_json(cls, text: str) -> Termination:
        """Also of one whose end was cut off, as far as it goes. Raises ValueError when the text is no
        termination message of ours.
        """
        try:
            said = _object(text, "termination message")
        except JsonError:
            found = _cut_off(text)
            if found is None:
                raise
            said = found
        data = _known(cls, said)
        if data.get("checkpoint") is not None:
            data["checkpoint"] = _build(CheckpointProgress, _known(CheckpointProgress, data["checkpoint"]))
        ends = data.get("also_failed", [])
        if not isinstance(ends, list):
            raise ValueError(f"Termination.also_failed must be a list; got {_shown(ends)}")
        read = (_build(RankEnd, _known(RankEnd, item)) for item in ends[:MAX_RANK_ENDS])
        data["also_failed"] = tuple(replace(item, reason=cut(item.reason, MAX_REASON_CHARS)) for item in read)
        return _build(cls, data)


_REASON_LIMITS = ((1500, MAX_REASON_CHARS), (1500, 80), (1500, 40))
_TEXT_LIMITS = (*_REASON_LIMITS, *((limit, 0) for limit in (1500, 800, 600, 400, 200, 100, 50, 20, 0)))
"""Characters of the culprit's texts and of the other ranks' reasons."""

_ESCAPE_CHARS = 6
"""Of the longest escape sequence in a JSON text."""


def _cut_off(text: str) -> dict[str, Any] | None:
    """What is whole in the beginning of a termination message, older launchers' too, which wrote the texts
    before step and checkpoint. Nothing is guessed: a number that may lack its end is left out."""
    if not text.startswith('{"attempt":'):
        return None
    # It ends within one of the culprit's texts, perhaps within an escape; between the other ranks; anywhere
    # else. What parts the fields is in no text, whose quotes are escaped.
    whole = [f'{text[: len(text) - less]}"}}' for less in range(_ESCAPE_CHARS)]
    whole.append(text.rpartition("},{")[0] + "}]}")
    whole += [text.rpartition(mark)[0] + "}" for mark in (",", ',"', ',"also_failed"', ',"checkpoint"')]
    for candidate in whole:
        with suppress(ValueError):
            return _object(candidate, "termination message")
    return None


def _rank_ends(ends: Sequence[RankEnd], limit: int) -> list[dict[str, Any]]:
    found = []
    for item in ends[:MAX_RANK_ENDS]:
        reason = {"reason": one_line(item.reason, limit)} if limit and item.reason else {}
        found.append({"rank": item.rank, "code": item.code, **reason})
    return found


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)


_PARTS: dict[str, type] = {"checkpoint": CheckpointProgress, "straggler": Straggler, "motion": Motion}


def _plain(value: Any) -> Any:
    """Without numbers and characters that no reader takes; a path is judged by its reader."""
    if isinstance(value, dict):
        return {key: item if key == "path" else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if type(value) is str:
        return one_line(value, MAX_TEXT_CHARS)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = strict_json(text)
    except JsonError as error:
        raise JsonError(f"{what} {error}", offset=error.offset) from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object; got {type(value).__name__}")
    return value


def _known(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__} must be a JSON object; got {_shown(data)}")
    names = {item.name for item in fields(cls)}
    return {key: value for key, value in data.items() if key in names}


_NONE = type(None)
_KINDS: dict[Any, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "int | None": (int, _NONE),
    "float | None": (int, float, _NONE),
    "str | None": (str, _NONE),
}


def _build(cls: type[T], data: dict[str, Any]) -> T:
    """The sender is the tenant's program: a wrong type must fail here, not where it is compared or added."""
    for name, value in data.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{cls.__name__}.{name} must fit 64 bits; got {value.bit_length()} bits")
    for item in fields(cls):  # type: ignore[arg-type]
        allowed = _KINDS.get(item.type, (object,))
        if item.name in data and (not isinstance(data[item.name], allowed) or data[item.name] is True):
            raise ValueError(f"{cls.__name__}.{item.name} must be {item.type}; got {_shown(data[item.name])}")
    # A phase is a text, too, and one of ours.
    texts = {name: _bounded(cls, name, value) for name, value in data.items() if type(value) is str}
    try:
        return cls(**{**data, **texts})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _bounded(cls: type, name: str, text: str) -> str:
    if cls is not CheckpointProgress or name != "path":
        return one_line(text, MAX_TEXT_CHARS)
    if len(text) > MAX_PATH_CHARS:
        raise ValueError(
            f"CheckpointProgress.path must have at most {MAX_PATH_CHARS} characters; got {len(text)}"
        )
    return text if is_printable(text) else ""


def _shown(value: object) -> str:
    return cut(repr(value), 200)


def _line(text: str | None, limit: int) -> str | None:
    return None if text is None else one_line(text, limit)
