"""DeepSpeed's names on a parameter whose values are on other ranks: `ds_id`, `ds_shape`, `ds_status`, ...

Scripts ask `hasattr(parameter, "ds_id")` before they gather. A parameter that is whole has none of these
names, and nothing has to be gathered then. They are computed from what the engine knows; the tensor itself
carries nothing.
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
    """Where the values of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Label:
    """An attribute that a function computes; whoever assigns it puts a value of his own in its place."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)


class ShardedLabels:
    """Attributes of a sharded parameter; base of the class that it has meanwhile."""

    __slots__ = ()

    @Label
    def ds_id(self) -> int:
        """A number of its own in this process."""
        number: int | None = _numbers.get(self)  # type: ignore[no-untyped-call]
        if number is None:
            number = _numbers[self] = next(_next_number)
        return number

    @Label
    def ds_shape(self) -> Any:
        """Its shape when it is whole, which is also what `shape` says here."""
        return _tensor(self).shape

    @Label
    def ds_numel(self) -> Any:
        """Its elements when it is whole."""
        return _tensor(self).numel()

    @Label
    def ds_status(self) -> ZeroParamStatus:
        """NOT_AVAILABLE."""
        return ZeroParamStatus.NOT_AVAILABLE

    @Label
    def ds_tensor(self) -> torch.Tensor:
        """A copy of this rank's part in the parameter's dtype, 1-D; empty where it has none. No
        communication."""
        # Not at the top: it imports the class that this is a base of.
        from zerotrain.runtime.zero.fragments import get_local_fp32

        parameter = _tensor(self)
        return get_local_fp32(parameter).to(parameter.dtype)


def _tensor(labels: Any) -> Any:
    return labels
