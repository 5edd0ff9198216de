"""Extra state that modules add to a state dict, besides tensors: `get_extra_state` and `set_extra_state`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.zero.names import walk

_SUFFIX = "_extra_state"

logger = logging.getLogger("zerotrain")


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with extra state, by its key in a state dict."""
    return {
        f"{name}.{_SUFFIX}" if name else _SUFFIX: layers[-1]
        for name, layers in walk(model)
        if type(layers[-1]).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the current extra states, by key."""
    return {key: module.get_extra_state() for key, module in modules_with_extra_state(model).items()}


def restore_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Restore the extra states from `extra_states`, for the keys that exist."""
    for key, module in modules_with_extra_state(model).items():
        if key in states:
            module.set_extra_state(states[key])


def exportable_extra_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the extra states that are tensors, which files of weights can hold; log the names of the
    others."""
    found = extra_states(model)
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    if left_out := sorted(found.keys() - tensors.keys()):
        logger.warning(
            "the export leaves %s out, which are no tensors: load it with strict=False, or restore them from "
            "a checkpoint of the engine",
            left_out[:5],
        )
    return tensors
