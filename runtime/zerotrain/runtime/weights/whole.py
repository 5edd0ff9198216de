"""The state dict of a sharded model as copies in host memory, assembled unit by unit.

Called by `engine.module_state_dict` and for PEFT adapters. Beside the copies it takes the memory of one unit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.zero.access import full_parameters
from zerotrain.runtime.zero.names import named_parameters, plain_key
from zerotrain.runtime.zero.placeholder import ParameterSharded
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.state_access import get_full_fp32


def whole_state(
    core: ShardedModel,
    *,
    part: nn.Module | None = None,
    without: Collection[int] = (),
    dtype: torch.dtype | None = None,
    keeps_values: bool = True,
) -> dict[str, Any]:
    """Return `model.state_dict()` with the plain model's names; shared tensors are one tensor under several
    names. Collective, with the same names on every rank.

    Args:
        part: module of the model, in place of all of it.
        without: ids of parameters to leave out; units without any other parameter are not gathered.
        dtype: of floating-point parameters, from the masters where those are closer; None = compute dtype.
        keeps_values: False = names and shapes alone, as meta tensors, on a rank that writes nothing.

    Raises RuntimeError while the model is in forward or backward.
    """
    core.check_idle("a whole state dict")
    core.updates.settle_all()
    model = core.model if part is None else part
    try:
        state = model.state_dict(keep_vars=True)
    except ParameterSharded:  # a module or hook of the model's reads weights for its state dict
        with full_parameters(model):
            state = {key: _copy(value, keeps_values) for key, value in model.state_dict().items()}
    left_out = {name for name, each in named_parameters(model, remove_duplicate=False) if id(each) in without}
    wanted = {plain_key(model, key): value for key, value in state.items() if id(value) not in without}
    wanted = {key: value for key, value in wanted.items() if key not in left_out}
    copies = _gathered(core, {id(value) for value in wanted.values()}, dtype, keeps_values)
    for value in wanted.values():
        if id(value) not in copies:
            copies[id(value)] = _copy(value, keeps_values)
    return {key: copies[id(value)] for key, value in wanted.items()}


def _gathered(
    core: ShardedModel, wanted: Collection[int], dtype: torch.dtype | None, keeps_values: bool
) -> dict[int, torch.Tensor]:
    """Return copies of the units' parameters with these ids, by id."""
    copies: dict[int, torch.Tensor] = {}
    for unit in core.units:
        members = [parameter for parameter in unit.parameters if id(parameter) in wanted]
        if not members:
            continue
        casts = dtype not in (None, unit.dtype) and unit.dtype.is_floating_point
        if casts and unit.layout.trainable:
            copies.update((id(each), _copy(get_full_fp32(each), keeps_values, dtype)) for each in members)
            continue
        with full_parameters(members):  # gathers this unit alone
            for parameter in members:
                copies[id(parameter)] = _copy(parameter, keeps_values, dtype if casts else None)
    return copies


def _copy(value: Any, keeps_values: bool, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of a tensor in host memory, or without memory; a deep copy of another value (extra
    state)."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    dtype = value.dtype if dtype is None else dtype
    if not keeps_values:
        return torch.empty(value.shape, dtype=dtype, device="meta")
    return value.detach().to("cpu", dtype, copy=True)


def frozen_parameters(model: nn.Module, *, but: Collection[int] = ()) -> set[int]:
    """Return the ids of the parameters that are not trained, without those of `but`."""
    return {
        id(parameter)
        for parameter in model.parameters()
        if not parameter.requires_grad and id(parameter) not in but
    }
