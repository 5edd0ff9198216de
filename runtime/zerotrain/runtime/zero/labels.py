"""DeepSpeed's attributes of a parameter whose values are on other ranks: `ds_id`, `ds_shape`, `ds_status`,
...

Scripts check `hasattr(parameter, "ds_id")` before they gather. A whole parameter has none of these
attributes, as it needs no gather. They are computed from what the engine knows; the tensor itself stores
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_numbers = WeakIdKeyDictionary()
_next_number = itertools.count()


class ZeroParamStatus(Enum):
    """Availability of a parameter's values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Label:
    """Attribute that a function computes; an assignment replaces it by the assigned value."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)


class ShardedLabels:
    """Attributes of a sharded parameter; base of the class that it has while it is hidden."""

    __slots__ = ()

    @Label
    def ds_id(self) -> int:
        """Number that identifies the parameter in this process."""
        number: int | None = _numbers.get(self)  # type: ignore[no-untyped-call]
        if number is None:
            number = _numbers[self] = next(_next_number)
        return number

    @Label
    def ds_shape(self) -> Any:
        """Shape of the whole parameter, which `shape` also returns here."""
        return _tensor(self).shape

    @Label
    def ds_numel(self) -> Any:
        """Number of elements of the whole parameter."""
        return _tensor(self).numel()

    @Label
    def ds_status(self) -> ZeroParamStatus:
        """Always NOT_AVAILABLE."""
        return ZeroParamStatus.NOT_AVAILABLE

    @Label
    def ds_tensor(self) -> torch.Tensor:
        """Copy of this rank's part in the parameter's dtype, 1-D; empty if this rank has none. No
        communication."""
        # Imported here, because that module imports the class that this is a base of.
        from zerotrain.runtime.zero.state_access import get_local_fp32

        parameter = _tensor(self)
        return get_local_fp32(parameter).to(parameter.dtype)


def _tensor(labels: Any) -> Any:
    return labels
