"""State of foreign objects as plain JSON values and back, so that no checkpoint needs pickle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

PAIRS = "__pairs__"
"""Key of an object that stands for a mapping whose keys are not texts."""


def to_plain(value: Any, path: str) -> Any:
    """Return the value in JSON types. Raises ValueError with the path of a value that has none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item, f"{path}.{key}") for key, item in value.items()}
        return {PAIRS: [[key, to_plain(item, f"{path}[{key!r}]")] for key, item in value.items()]}
    raise ValueError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "keep numbers, texts, lists and mappings in the state"
    )


def from_plain(value: Any, like: Any) -> Any:
    """Convert a value of `to_plain` back; `like` is a value of the same shape that shows the types."""
    if isinstance(value, dict) and PAIRS in value:
        pairs = dict(value[PAIRS])
        return Counter(pairs) if isinstance(like, Counter) else pairs
    if isinstance(value, dict):
        known = like if isinstance(like, dict) else {}
        return {key: from_plain(item, known.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        alike = isinstance(like, (list, tuple)) and len(like) == len(value)
        items = [from_plain(item, like[index] if alike else None) for index, item in enumerate(value)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    return value
