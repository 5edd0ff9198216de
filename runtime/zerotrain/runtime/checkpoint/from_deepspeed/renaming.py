"""Names of a DeepSpeed checkpoint without the additions of `torch.compile` and `checkpoint_wrapper`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotrain.runtime.zero.names import without_wrappers

_BY_NAME = ("module", "frozen_param_shapes", "frozen_param_fragments", "shared_params")


def with_plain_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model file's dictionary with the names that the model has without wrappers."""
    found = dict(model)
    for key in _BY_NAME:
        if isinstance(found.get(key), Mapping):
            found[key] = _renamed(found[key])
    if isinstance(found.get("shared_params"), Mapping):
        found["shared_params"] = {
            alias: without_wrappers(owner) if isinstance(owner, str) else owner
            for alias, owner in found["shared_params"].items()
        }
    if isinstance(found.get("param_shapes"), (list, tuple)):
        found["param_shapes"] = [
            _renamed(group) if isinstance(group, Mapping) else group for group in found["param_shapes"]
        ]
    if isinstance(found.get("buffer_names"), (list, tuple, set)):
        found["buffer_names"] = [
            without_wrappers(name) if isinstance(name, str) else name for name in found["buffer_names"]
        ]
    return found


def _renamed(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return {without_wrappers(key) if isinstance(key, str) else key: value for key, value in values.items()}
