"""Attributes of modules, in which they may keep tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

_OWN = tuple(vars(nn.Module()))
"""Names of torch's own attributes, which come first unless a class set others before `super().__init__()`."""
_FIRST, _NUM_OWN = _OWN[0], len(_OWN)
_PLAIN = frozenset({int, float, bool, str, type(None)})


def attributes(module: nn.Module, *, tensors_only: bool) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield dict, name and value of the attributes and buffers of the module and of those in it, without
    torch's own attributes and plain values.

    Every call of a unit's module comes here, so it does without `modules()`, which takes as long as the rest.
    """
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        waiting += each._modules.values()
        own = vars(each)
        skipped = _NUM_OWN if next(iter(own)) == _FIRST else 0
        for name, value in islice(own.items(), skipped, None):
            if type(value) not in _PLAIN and (
                isinstance(value, torch.Tensor) or not (tensors_only or name in _OWN)
            ):
                yield own, name, value
        for name, value in each._buffers.items():
            yield each._buffers, name, value
