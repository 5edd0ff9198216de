"""Messages from a rank to the launcher and from the launcher to the operator: progress and termination.

Both are one JSON object. Readers ignore unknown keys, so that an operator can be older or newer than the
image of a job.
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
"""Largest termination message in bytes.

The kubelet keeps 4096 bytes of a container's termination message, and 12 KiB of a pod's in equal parts for
all its containers. This size remains if service meshes and similar tools have added five containers.
"""

MAX_RANKS = 64
"""Largest number of ranks of one worker, as the API allows."""

MAX_RANK_ENDS = MAX_RANKS
"""Largest number of other failed ranks in a termination message."""

MAX_REASON_CHARS = 160
"""Length of the reason of one of them."""

MAX_REJECTED = 20
"""Number of damaged checkpoints that are read from a record: the newest, which come first."""

MAX_PATH_CHARS = 1024
"""Length of the path of a checkpoint's folder.

The path is stored in the job's status, where each character may take twelve bytes. A cut path would be
another path, so a longer one is rejected. A path with control characters is left out.
"""

MAX_TEXT_CHARS = 2000
"""Length of any other text; the middle of a longer one is removed."""

T = TypeVar("T")


class Phase(StrEnum):
    """Present activity of a rank; hang limits differ per phase."""

    INIT = "init"
    """Process start, imports, building the model, loading a checkpoint."""
    RENDEZVOUS = "rendezvous"
    FIRST_STEP = "first_step"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    DONE = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointProgress:
    """The newest checkpoint that this attempt knows to be durable (committed and synced)."""

    step: int
    path: str
    time: float
    """Unix seconds at the commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that was found damaged and skipped."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """The rank whose own work takes longest. Own work is the time of a step without waits for other ranks."""

    rank: int
    own_seconds: float
    """Median of its last steps."""
    median_seconds: float
    """Median of all ranks' medians."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Motion:
    """Changes of a rank's records, as its launcher measured them on a monotonic clock."""

    idle_seconds: float
    """Seconds since the step or the phase last changed."""
    silent_seconds: float
    """Seconds since the rank's last message, which it repeats every few seconds while its process runs.

    It is 0 once the process has ended, because an older operator would otherwise take the process for a
    stopped one.
    """
    ended_seconds: float | None = None
    """Seconds since its process ended; None while it runs, and from an older launcher."""
    steps_seen: int = 0
    """Number of steps of this attempt behind the other values."""
    step_p99_seconds: float | None = None
    """99th percentile of the last steps, with data and without checkpoints."""
    longest_step_seconds: float | None = None
    """Longest time without a change of this attempt's step, apart from the first step.

    For a program that reports every few steps, it is the time of that many steps.
    """
    first_step_seconds: float | None = None
    """Seconds of this attempt in phase first_step until its first step was done.

    Compilation and warm-up are included. None for a program without such a phase.
    """
    longest_checkpoint_seconds: float | None = None
    """Longest checkpoint of this attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of one rank. Times are Unix seconds of the worker's clock."""

    rank: int
    attempt: int
    phase: Phase = Phase.INIT
    step: int = 0
    """Optimizer steps done, earlier attempts included."""
    total_steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    """Tokens per second of the whole job, over the last log interval."""
    step_seconds: float | None = None
    """Mean over the last log interval."""
    step_flops: float | None = None
    """Floating-point operations of the model in one step of the whole job, by formula; the mean over the last
    log interval."""
    mfu: float | None = None
    """Model FLOPs utilisation over the last log interval: a part of the devices' peak, which is 1."""
    evaluated: int = 0
    """Forward passes of evaluations so far in this attempt, each of which shows that a pause goes on."""
    step_at: float = 0.0
    """Time at which `step` last changed; 0 before the first step."""
    heartbeat_at: float = 0.0
    checkpoint: CheckpointProgress | None = None
    resumed_from: int | None = None
    """Step that this attempt resumed from; None if it started without a checkpoint."""
    resumed_job: str | None = None
    """UID of the job that wrote that checkpoint; None if it is not known.

    It is empty for a checkpoint that no job wrote (imported, or of a local run).
    """
    rejected_checkpoints: tuple[RejectedCheckpoint, ...] = ()
    """Rejected checkpoints, newest first."""
    memory_peak_bytes: int = 0
    """Largest allocation of the rank on its accelerator; on CPUs its largest resident size."""
    host_peak_bytes: int = 0
    """Largest resident size of the rank's process."""
    spill_peak_bytes: int = 0
    """Largest amount that it had spilled to disk."""
    collective_wait_seconds: float | None = None
    """Seconds that the rank has waited in a collective; 0 = it is in none, None = unknown."""
    straggler: Straggler | None = None
    """The slowest of all ranks.

    Only rank 0 reports it, from the numbers that all ranks exchange at a step.
    """
    motion: Motion | None = None
    """Measurements of the launcher; None for a program that never reported."""

    def to_json(self) -> str:
        """Return the record as JSON. Numbers without a JSON form (such as a diverged loss) become null."""
        return _dump(_plain(asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Parse a record. Raises ValueError if a required key is missing or the text is not an object."""
        return cls.from_record(_object(text, "progress"))

    @classmethod
    def from_record(cls, record: object) -> Progress:
        """Build a record from parsed JSON. Raises ValueError as `from_json` does."""
        data = _known(cls, record)
        data["phase"] = Phase(data.get("phase", Phase.INIT))
        for name, kind in _PARTS.items():
            if data.get(name) is not None:
                data[name] = build(kind, _known(kind, data[name]))
        if not isinstance(data.get("rejected_checkpoints", []), list):
            raise ValueError(
                f"Progress.rejected_checkpoints must be a list; got {_shown(data['rejected_checkpoints'])}"
            )
        data["rejected_checkpoints"] = tuple(
            build(RejectedCheckpoint, _known(RejectedCheckpoint, item))
            for item in data.get("rejected_checkpoints", ())[:MAX_REJECTED]
        )
        return build(cls, data)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of one of several failed ranks."""

    rank: int
    code: int
    """Exit code; 128+n for signal n."""
    reason: str = ""
    """Type and text of its exception, if the rank could report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Termination:
    """The reason why a worker ended, as its container's termination message.

    Small values that decide the reaction come first, long texts last, because the kubelet may cut off the
    end.
    """

    attempt: int
    code: int
    rank: int | None = None
    """First rank that failed; None if none did."""
    signal: int | None = None
    step: int = 0
    resumed_from: int | None = None
    """Step that the attempt resumed from, as in Progress, like `resumed_job`.

    An attempt without remaining work may end before any request for its progress.
    """
    resumed_job: str | None = None
    checkpoint: CheckpointProgress | None = None
    exception: str | None = None
    """Type and text of the exception that ended the rank."""
    last_line: str | None = None
    also_failed: tuple[RankEnd, ...] = ()
    """Failed ranks of the worker beside `rank`, in the order of their ends."""

    def to_json(self) -> str:
        """Return at most MAX_TERMINATION_BYTES of UTF-8.

        To fit, it gives up in this order: the reasons of the other ranks, the middle of the first failed
        rank's texts, the checkpoint. The codes of MAX_RANK_ENDS other ranks are always kept.
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
        """Parse a message. If its end was cut off, the part before that is used.

        Raises ValueError if the text is not a termination message of the launcher.
        """
        try:
            record = _object(text, "termination message")
        except JsonError:
            found = _cut_off(text)
            if found is None:
                raise
            record = found
        data = _known(cls, record)
        if data.get("checkpoint") is not None:
            data["checkpoint"] = build(CheckpointProgress, _known(CheckpointProgress, data["checkpoint"]))
        ends = data.get("also_failed", [])
        if not isinstance(ends, list):
            raise ValueError(f"Termination.also_failed must be a list; got {_shown(ends)}")
        read = (build(RankEnd, _known(RankEnd, item)) for item in ends[:MAX_RANK_ENDS])
        data["also_failed"] = tuple(replace(item, reason=cut(item.reason, MAX_REASON_CHARS)) for item in read)
        return build(cls, data)


_REASON_LIMITS = ((1500, MAX_REASON_CHARS), (1500, 80), (1500, 40))
_TEXT_LIMITS = (*_REASON_LIMITS, *((limit, 0) for limit in (1500, 800, 600, 400, 200, 100, 50, 20, 0)))
"""Length of the first failed rank's texts and of the other ranks' reasons, in characters."""

_ESCAPE_CHARS = 6
"""Length of the longest escape sequence in a JSON text."""


def _cut_off(text: str) -> dict[str, Any] | None:
    """Return the complete fields at the beginning of a termination message.

    Messages of older launchers, which wrote the texts before step and checkpoint, are supported. Nothing is
    guessed: a number that may lack its end is left out.
    """
    if not text.startswith('{"attempt":'):
        return None
    # The cut is within one of the first failed rank's texts, perhaps within an escape; or between the other
    # ranks; or anywhere else. The separators of the fields cannot occur in a text, whose quotes are escaped.
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
    """Remove numbers and characters that readers reject. A path is kept, because its reader checks it."""
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
    "bool": (bool,),
}


def build(cls: type[T], data: dict[str, Any]) -> T:
    """Build a record and check its types.

    The sender is the tenant's program, so a wrong type must fail here and not where the value is compared or
    added.
    """
    for name, value in data.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{cls.__name__}.{name} must fit 64 bits; got {value.bit_length()} bits")
    for item in fields(cls):  # type: ignore[arg-type]
        allowed = _KINDS.get(item.type, (object,))
        is_wrong = item.name in data and not isinstance(data[item.name], allowed)
        if is_wrong or (data.get(item.name) is True and bool not in allowed):
            raise ValueError(f"{cls.__name__}.{item.name} must be {item.type}; got {_shown(data[item.name])}")
    # A phase is a text, too, but comes from the product's own enum.
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
