"""`deepspeed.utils`: access to one parameter's state, logging and loaders, as aliases.

The state functions raise where DeepSpeed's return None: for a frozen parameter, and for a gradient after
`step()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.utils import groups, init_on_device, logging, timer, zero_to_fp32
from zerotrain.runtime.deepspeed.utils.init_on_device import OnDevice
from zerotrain.runtime.deepspeed.utils.logging import log_dist, logger
from zerotrain.runtime.zero import leaves, state_access
from zerotrain.runtime.zero.state_access import get_full_fp32 as safe_get_full_fp32_param
from zerotrain.runtime.zero.state_access import get_full_grad as safe_get_full_grad
from zerotrain.runtime.zero.state_access import get_local_fp32 as safe_get_local_fp32_param
from zerotrain.runtime.zero.state_access import get_local_grad as safe_get_local_grad
from zerotrain.runtime.zero.state_access import set_full_fp32 as safe_set_full_fp32_param
from zerotrain.runtime.zero.state_access import set_full_grad as safe_set_full_grad
from zerotrain.runtime.zero.state_access import set_local_fp32 as safe_set_local_fp32_param
from zerotrain.runtime.zero.state_access import set_local_grad as safe_set_local_grad

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "init_on_device",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "timer",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

__getattr__ = attributes_of(__name__)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Call `zerotrain.runtime.get_full_optimizer_state`."""
    return state_access.get_full_optimizer_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Call `zerotrain.runtime.set_full_optimizer_state`, with the key last."""
    state_access.set_full_optimizer_state(param, optim_state_key, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Call `zerotrain.runtime.get_local_optimizer_state`."""
    return state_access.get_local_optimizer_state(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Call `zerotrain.runtime.set_local_optimizer_state`, with the key last."""
    state_access.set_local_optimizer_state(param, optim_state_key, value)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes (or names of classes) as a unit that is gathered as a whole; return
    the marked modules. Call it before `initialize`.

    Raises ValueError when none is found, RuntimeError for a model that an engine drives already.
    """
    return _mark(model, leaf_module_classes, raise_if_not_found, is_leaf=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks and return the modules; errors as of `set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, raise_if_not_found, is_leaf=False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark; errors as of `set_z3_leaf_modules`."""
    leaves.mark_leaf(model, is_leaf=flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return leaves.marked_in(model)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is marked."""
    return leaves.is_leaf(model)


def _mark(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], must_exist: bool, *, is_leaf: bool
) -> list[nn.Module]:
    found = leaves.of_classes(model, classes)
    if must_exist and not found:
        raise ValueError(f"the model has no module of {list(classes)}")
    for module in found:
        leaves.mark_leaf(module, is_leaf=is_leaf)
    return found


class RepeatingLoader:
    """Restarts a loader when it ends: the loader of `initialize` with the next epoch's order, any other one
    unchanged; the user must set the epoch of a sampler of their own."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._items = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)
