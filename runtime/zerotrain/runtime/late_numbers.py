"""Numbers of a step that a device knows before the host does: the sums of squares of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.streams import HostCopy

NORM_LABEL = "gradient norm"
"""Label of the gather of the ranks' sums of squares."""


class LateNumber:
    """Attribute of a dataclass: a number, or a function that returns it, which the first read calls."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> float: ...

    @overload
    def __get__(self, instance: Any, owner: type) -> float: ...

    def __get__(self, instance: Any, owner: type) -> float:
        if instance is None:
            return 0.0  # the attribute's default
        kept = instance.__dict__
        if callable(kept[self._name]):
            kept[self._name] = kept[self._name]()
        number: float = kept[self._name]
        return number

    def __set__(self, instance: Any, value: float | Callable[[], float]) -> None:
        instance.__dict__[self._name] = value


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
        self._num_units = by_unit.numel()
        self._check: Callable[[], None] | None = comm.check
        """Raises for a collective that the watchdog aborted. None once the sums were read: who keeps a result
        must not keep the engine."""
        self._copy = HostCopy(torch.cat((by_unit, self.by_rank)))

    def read(self) -> tuple[list[float], list[float]]:
        """Return the sums by unit and by rank, once the device has computed them. Raises CommError where
        ranks have diverged meanwhile."""
        values: list[float] = self._copy.read().tolist()
        check, self._check = self._check, None
        if check is not None:
            check()
        return values[: self._num_units], values[self._num_units :]

    def norm(self, gradient_scale: float) -> float:
        """Return the norm of the gradient of all ranks; `gradient_scale` is the factor that it contains."""
        _, by_rank = self.read()
        return float(sum(by_rank) ** 0.5 / gradient_scale)
