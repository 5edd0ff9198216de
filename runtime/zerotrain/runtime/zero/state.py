"""What the engine hands to the checkpoint package, and takes back.

The engine fills a `CheckpointState`; `zerotrain.runtime.checkpoint` writes it out or overwrites its contents
in place (any number of ranks before, this number now); the engine then calls `after_state_load()` to
re-derive everything that is not stored: compute-precision weights, replicas, schedules. A state is a
`StateStream`, so that one in a spill file is saved and loaded without ever being in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zerotrain.runtime.zero.layout import ModelLayout

MASTER = "master"
"""fp32 value of a trainable parameter."""

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MAX_EXP_AVG_SQ = "max_exp_avg_sq"
MOMENTUM = "momentum"
SUM = "sum"
"""Adagrad's sum of squared gradients."""

WORKER_ERROR = "worker_error"
"""1-bit Adam: what one rank's compression left out; the kind is this, a dot and the rank."""
SERVER_ERROR = "server_error"

PARAM = "param"
"""Value of a frozen parameter in the unit's own dtype."""

StreamKey = tuple[str, str]
"""(unit name, kind)."""


class StateTensors(Protocol):
    """What the optimizer keeps of one unit, wherever and however it is stored; 1-D, of `interval`."""

    @property
    def interval(self) -> tuple[int, int]:
        """Elements of the unit that these states cover: this rank's, or all where they are replicated."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """State kinds beside MASTER."""
        ...

    def read(self, kind: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """An fp32 copy of elements `[start, stop)` of the interval, of MASTER or a kind. No communication."""
        ...

    def write(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on; of MASTER also the weights of this rank that are rounded from
        it. No communication."""
        ...


class StateStream(Protocol):
    """One sequence of elements of a checkpoint, read and written piece by piece.

    Whoever goes through one takes `windows`, and of several kinds of a unit the same window one after the
    other: a tier that keeps them side by side then moves each of its tiles once.
    """

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)`, 1-D: a copy or the memory itself, which the caller does not write to."""
        ...

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from `start` on by a 1-D tensor of any floating dtype, on any device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TensorStream:
    """A `StateStream` over a 1-D tensor that is resident."""

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
"""Elements of a stream that are in hand at a time."""


def windows(numel: int) -> Iterator[tuple[int, int]]:
    """`(start, stop)` of the parts in which a stream of `numel` elements is gone through."""
    for start in range(0, numel, WINDOW_NUMEL):
        yield start, min(start + WINDOW_NUMEL, numel)


def whole(stream: StateStream) -> torch.Tensor:
    """All of a stream at once, where it is known to be small."""
    return stream.read(0, stream.numel)


def is_optional(kind: str) -> bool:
    """Whether a state may be missing from a checkpoint, and starts as zeros then: errors of compression, as
    another number of ranks has others."""
    return kind.startswith((WORKER_ERROR, SERVER_ERROR))


@dataclass(kw_only=True)
class CheckpointState:
    """This rank's part of everything that a checkpoint must hold.

    `streams[unit, kind]` has `layout.shard_numel(unit)` elements: the interval
    `layout.shard_range(unit, rank)` of that unit. The streams are the engine's own state (also at stage 0,
    where they are slices of the replicated one), so that writing into them is loading.
    """

    layout: ModelLayout
    rank: int
    world_size: int
    streams: dict[StreamKey, StateStream]
    scalars: dict[str, Any] = field(default_factory=dict)
    """JSON-able and equal on every rank: step counts, learning-rate schedule, loss scale. `load` replaces the
    contents."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent module buffers by fqn; each rank holds them whole."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What modules with `get_extra_state` add to a state dict, by its key there. `load` replaces it by what
    the checkpoint has under these keys."""
    accepts: Callable[[Mapping[str, Any]], object] = lambda _scalars: None
    """Called with the scalars of a checkpoint before anything is overwritten; raises CheckpointMismatch."""
    given_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Of the buffers that the engine cast: the dtypes that the model gave them."""

    def stored_buffer(self, fqn: str) -> torch.Tensor:
        """The buffer as a checkpoint holds it: in the dtype that the model gave it, where that can hold what
        training made of it, so that the checkpoint fits other compute dtypes, too."""
        buffer, given = self.buffers[fqn], self.given_dtypes.get(fqn)
        fits = given is not None and torch.promote_types(given, buffer.dtype) == given
        return buffer.to(given) if fits else buffer

    @property
    def kinds(self) -> tuple[str, ...]:
        """The state kinds present, sorted."""
        return tuple(sorted({kind for _, kind in self.streams}))
