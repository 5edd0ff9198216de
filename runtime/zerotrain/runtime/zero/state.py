"""Interface between the engine and the checkpoint package: the state that is saved and loaded.

The engine fills a `CheckpointState`; `zerotrain.runtime.checkpoint` writes it out or overwrites its contents
in place (saved by any number of ranks, loaded by the present number). The engine then calls
`after_state_load()` to derive everything that is not stored: compute-precision weights, replicas, schedules.
A state is a `StateStream`, so that a spilled one is saved and loaded without ever being whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zerotrain.runtime.zero.layout import ModelLayout

MASTER = "master"
"""Kind of the fp32 value of a trainable parameter."""

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MAX_EXP_AVG_SQ = "max_exp_avg_sq"
MOMENTUM = "momentum"
SUM = "sum"
"""Kind of Adagrad's sum of squared gradients."""

WORKER_ERROR = "worker_error"
"""Prefix of the kinds of 1-bit Adam's compression errors, one per rank: this, a dot and the rank."""
SERVER_ERROR = "server_error"

PARAM = "param"
"""Kind of the value of a frozen parameter, in the unit's own dtype."""

StreamKey = tuple[str, str]
"""(unit name, kind)."""


class StateTensors(Protocol):
    """Optimizer states of one unit, independent of how they are stored; 1-D, of `interval`."""

    @property
    def interval(self) -> tuple[int, int]:
        """Elements of the unit that these states cover: this rank's, or all if they are replicated."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of states in addition to MASTER."""
        ...

    def read(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return an fp32 copy of elements `[start, stop)` of the interval, of MASTER or a kind. No
        communication."""
        ...

    def write(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on; for MASTER also this rank's weights that are rounded from it.
        No communication."""
        ...


class StateStream(Protocol):
    """One sequence of elements of a checkpoint, read and written piece by piece.

    Callers iterate with `windows`, and process the same window of a unit's kinds one after the other: a tier
    that stores the kinds side by side then moves each of its tiles once.
    """

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)`, 1-D: a copy or the memory itself, which the caller must not write
        to."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on by a 1-D tensor of any floating dtype, on any device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TensorStream:
    """A `StateStream` over a 1-D tensor in memory."""

    tensor: torch.Tensor

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    @torch.no_grad()
    def write(self, start: int, values: torch.Tensor) -> None:
        self.tensor[start : start + values.numel()].copy_(values)


WINDOW_NUMEL = 1 << 20
"""Maximum number of elements of a stream in memory at a time."""


def windows(numel: int) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of the parts in which a stream of `numel` elements is processed."""
    for start in range(0, numel, WINDOW_NUMEL):
        yield start, min(start + WINDOW_NUMEL, numel)


def whole(stream: StateStream) -> torch.Tensor:
    """Return all of a stream at once, if it is known to be small."""
    return stream.read(0, stream.numel)


def is_optional(kind: str) -> bool:
    """Return whether a state may be missing from a checkpoint, and then starts as zeros: compression errors,
    which differ with the number of ranks."""
    return kind.startswith((WORKER_ERROR, SERVER_ERROR))


@dataclass(kw_only=True)
class CheckpointState:
    """Part of this rank in everything that a checkpoint must hold.

    `streams[unit, kind]` has `layout.shard_numel(unit)` elements: the interval `layout.shard_range(unit,
    rank)` of that unit. The streams are the engine's own state (also at stage 0, where they are slices of the
    replicated one), so writing into them loads the checkpoint.
    """

    layout: ModelLayout
    rank: int
    world_size: int
    streams: dict[StreamKey, StateStream]
    scalars: dict[str, Any] = field(default_factory=dict)
    """Values that JSON can hold, equal on every rank: step counts, learning-rate schedule, loss scale. `load`
    replaces the contents."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent module buffers by fqn; each rank holds them whole."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Extra state of modules with `get_extra_state`, by its key in the state dict. `load` replaces it by the
    checkpoint's values under these keys."""
    accepts: Callable[[Mapping[str, Any]], object] = lambda _scalars: None
    """Called with the scalars of a checkpoint before anything is overwritten; raises CheckpointMismatch."""
    given_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Original dtypes of the buffers that the engine cast."""

    def stored_buffer(self, fqn: str) -> torch.Tensor:
        """Return the buffer in the dtype that a checkpoint holds.

        That is the dtype that the model gave it, if it can represent the current one, so that the checkpoint
        fits other compute dtypes, too.
        """
        buffer, given = self.buffers[fqn], self.given_dtypes.get(fqn)
        fits = given is not None and torch.promote_types(given, buffer.dtype) == given
        return buffer.to(given) if fits else buffer

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the states present, sorted."""
        return tuple(sorted({kind for _, kind in self.streams}))
