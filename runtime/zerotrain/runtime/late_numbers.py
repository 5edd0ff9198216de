"""Numbers of a step that a device knows before the host does: the norm, and whether the step was skipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import HostCopy

NORM_LABEL = "gradient norm"
"""Label of the gather of the ranks' sums of squares."""

Value = TypeVar("Value")


class Late(Generic[Value]):
    """Attribute of a dataclass: a value, or a function that returns it, which the first read calls."""

    def __init__(self, default: Value) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Value: ...

    @overload
    def __get__(self, instance: Any, owner: type) -> Value: ...

    def __get__(self, instance: Any, owner: type) -> Value:
        if instance is None:
            return self._default
        kept = instance.__dict__
        if callable(kept[self._name]):
            kept[self._name] = kept[self._name]()
        value: Value = kept[self._name]
        return value

    def __set__(self, instance: Any, value: Value | Callable[[], Value]) -> None:
        instance.__dict__[self._name] = value


class StepLoss:
    """Loss of the step in progress, whose parts are on their way to the host."""

    def __init__(self) -> None:
        self._parts: list[HostCopy] = []

    def add(self, loss: torch.Tensor, *, weight: float) -> None:
        """Add a part, without waiting for the device."""
        self._parts.append(HostCopy(loss.reshape(()).to(torch.float64) * weight))

    def take(self) -> float | None:
        """Return the sum of the parts, None without any, and begin anew. Waits until the device has computed
        them, not for what came after."""
        parts, self._parts = self._parts, []
        return sum(float(part.read()) for part in parts) if parts else None


class DeviceSquares:
    """Sums of squares of one step's gradients, on the device and on their way to the host."""

    def __init__(self, by_unit: torch.Tensor, comm: Comm) -> None:
        """Gather the ranks' sums. Collective; the host waits for nothing. `by_unit`: sums of this rank's
        parts of the units, float64."""
        mine = self.by_rank = by_unit.sum().view(1)
        """Sum of every rank, float64."""
        if comm.world_size > 1:
            self.by_rank = torch.empty(comm.world_size, dtype=mine.dtype, device=mine.device)
            comm.all_gather(self.by_rank, mine, label=NORM_LABEL).wait()
        self._num_units, self._check = by_unit.numel(), comm.check
        self._copy = HostCopy(torch.cat((by_unit, self.by_rank)))

    def read(self) -> tuple[list[float], list[float]]:
        """Return the sums by unit and by rank, once the device has computed them. Raises CommError where
        ranks have diverged meanwhile."""
        values: list[float] = self._copy.read().tolist()
        self._check()
        return values[: self._num_units], values[self._num_units :]


class LateStep:
    """A step whose update was started before the host knew what the device found in its gradients.

    `settle` reads it, and then calls `end` if somebody must know the units that were not finite, and `undo`
    if the step was skipped after all.
    """

    def __init__(
        self,
        squares: DeviceSquares,
        *,
        gradient_scale: float,
        may_skip: bool,
        end: Callable[[list[bool], bool], None],
    ) -> None:
        """`gradient_scale` is the factor of the loss scaling in the gradients; `may_skip`: a step with a
        gradient that is not finite does not count. `end` gets whether each unit, and whether any, was not
        finite."""
        self.may_skip = may_skip
        self.undo: Callable[[], None] | None = None
        """Takes back what was counted for the step; see `TrainingLoop`."""
        self._squares: DeviceSquares | None = squares
        self._gradient_scale = gradient_scale
        self._end: Callable[[list[bool], bool], None] | None = end
        self._norm, self._is_skipped = 0.0, False

    def settle(self) -> None:
        """Read what the device found, once, and let everything that depends on it follow. Raises CommError
        where ranks have diverged meanwhile, LossScaleError as `LossScaler.update`."""
        if self._squares is None:
            return
        by_unit, by_rank = self._squares.read()
        self._norm = sum(by_rank) ** 0.5 / self._gradient_scale
        overflow = not all(map(math.isfinite, by_rank))
        self._is_skipped = overflow and self.may_skip
        # Forgotten, since whoever keeps the result of a step must not keep the engine.
        undo, end, self._squares, self.undo, self._end = self.undo, self._end, None, None, None
        if self._is_skipped and undo is not None:
            undo()
        if end is not None:
            end([not math.isfinite(value) for value in by_unit], overflow)

    def norm(self) -> float:
        """Return the norm of the gradient of all ranks."""
        self.settle()
        return self._norm

    def is_skipped(self) -> bool:
        """Return whether the device left everything unchanged."""
        self.settle()
        return self._is_skipped
