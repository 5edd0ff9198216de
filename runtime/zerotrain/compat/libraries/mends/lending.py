"""Models that go from engine to engine: lent to one that evaluates, or withdrawn from one that is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zerotrain.runtime.construct.expressions import Expression
from zerotrain.runtime.construct.pending import expression_of, is_pending, make_pending
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.initialization import initialize
from zerotrain.runtime.zero.access import full_parameters
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel
from zerotrain.runtime.zero.state_access import get_full_fp32

FOR_EVALUATION = ("fp16", "bf16", "fp8", "torch_autocast", "data_types", "aio")
"""Top-level keys of the JSON, besides `zero_optimization`, that an evaluation depends on."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A parameter as it was before an engine took it over."""

    parameter: nn.Parameter
    kind: type[nn.Parameter]
    requires_grad: bool
    values: torch.Tensor | Expression
    """Memory of the parameter, or what gives its values where they were not read yet."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Before:
        values = expression_of(parameter) if is_pending(parameter) else parameter.data
        return cls(parameter, type(parameter), parameter.requires_grad, values)

    @torch.no_grad()
    def with_present_values(self) -> _Before:
        """Return the same with the values that the parameter has now, where it had its own. Collective."""
        with full_parameters(self.parameter):
            if isinstance(self.values, torch.Tensor):
                self.values.copy_(self.parameter)
                return self
            values = self.parameter.to("cpu", self.values.dtype, copy=True)
        return replace(self, kind=nn.Parameter, values=values.detach())

    def restore(self) -> None:
        """Make the parameter what it was."""
        if isinstance(self.values, torch.Tensor):
            self.parameter.__class__ = self.kind
            self.parameter.data = self.values
        else:
            make_pending(self.parameter, self.values)
        self.parameter.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class _Loan:
    """An engine that has a model for a while, and the model as it was before."""

    engine: Engine
    parameters: list[_Before]
    buffers: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]]
    """Buffers of each module, and a copy of that dictionary: an engine may move or cast them."""


_lent: WeakKeyDictionary[nn.Module, _Loan] = WeakKeyDictionary()
"""Model -> its loan."""


def is_driven(model: nn.Module) -> bool:
    """Return whether an open engine has the model."""
    return driver_of(model) is not None


def common_uses(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for code that every rank runs: it may compute with the model's parameters where an
    engine has them."""
    core = driver_of(model)
    return nullcontext() if core is None else core.uses.common()


def driver_of(model: nn.Module) -> ShardedModel | None:
    """Return what an open engine made of the model, or of the model that this is a part of."""
    owners = (owner_of(parameter) for parameter in model.parameters())
    return next((each for each in owners if isinstance(each, ShardedModel) and not each.is_closed), None)


def is_deferred(model: nn.Module) -> bool:
    """Return whether the model was made within `zero.Init`: its values can be taken over once."""
    return any(parameter.is_meta for parameter in model.parameters())


def is_lent(model: nn.Module) -> bool:
    """Return whether `lend` gave the model to an engine that has it still."""
    return model in _lent


def lend_for_evaluation(model: nn.Module, config: Mapping[str, Any]) -> Engine:
    """Lend the model to an engine of a training's JSON; return the engine. Collective.

    It has the part of the JSON that an evaluation needs. Below stage 3 each rank has the whole model.
    """
    blocks: dict[str, Any] = {key: config[key] for key in FOR_EVALUATION if key in config}
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3:
        blocks["zero_optimization"] = {key: zero[key] for key in zero if key != "offload_optimizer"}
    lend(model, lambda: initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **blocks})[0])
    return _lent[model].engine


def lend(model: nn.Module, make_engine: Callable[[], Any]) -> nn.Module:
    """Let `make_engine` make an engine that only evaluates the model; return the model, whose calls are the
    engine's. Collective, as is `give_back`.

    Parameters whose values are not read yet take no memory besides the engine's; the memory of others is
    kept. Raises ValueError for parameters that were made within `zero.Init`, which can be taken over once.
    """
    if is_deferred(model):
        raise ValueError(
            f"{type(model).__name__} has no values yet, as it was made within zero.Init (or on the meta "
            "device), so that it cannot be evaluated before it is trained: train first, or make the model by "
            "from_pretrained or from_config, or without zero.Init"
        )
    before = [_Before.of(parameter) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for each in before:
        each.parameter.requires_grad_(False)
    _lent[model] = _Loan(make_engine(), before, buffers)
    return model


def give_back(model: nn.Module, *, keep_values: bool = False) -> None:
    """End the engine of a lent model, whose parameters and buffers are what they were before, or, with
    `keep_values`, have the values that they got meanwhile. Collective."""
    loan = _lent.pop(model)
    parameters = [each.with_present_values() if keep_values else each for each in loan.parameters]
    loan.engine.close()
    for each in parameters:
        each.restore()
    for current, before in loan.buffers:
        if keep_values:
            _copy_buffers(current, before)
        current.update(before)


@torch.no_grad()
def _copy_buffers(
    source: Mapping[str, torch.Tensor | None], target: Mapping[str, torch.Tensor | None]
) -> None:
    for name, buffer in target.items():
        if buffer is not None and (present := source[name]) is not None:
            buffer.copy_(present)


def withdraw(model: nn.Module) -> None:
    """Take a model from the engine that has it, and close that, so that another can take the model over.
    Collective.

    Rank 0 gets the values, in host memory, trained ones in fp32. The others get none, because `initialize`
    takes those of rank 0.
    """
    core = driver_of(model)
    if core is None:
        return
    kinds = {
        parameter: kind
        for unit in core.units
        for parameter, kind in zip(unit.parameters, unit.views.classes, strict=True)
    }
    values = {parameter: _value_on_rank_0(parameter, core.comm.rank) for parameter in kinds}
    core.callbacks.close()
    for parameter, kind in kinds.items():
        parameter.__class__ = kind
        parameter.data = values[parameter]


def _value_on_rank_0(parameter: nn.Parameter, rank: int) -> torch.Tensor:
    """Return the value in host memory, without memory on the other ranks. Collective."""
    dtype = torch.float32 if parameter.requires_grad else parameter.dtype
    value = get_full_fp32(parameter)
    if rank:
        return torch.zeros((), dtype=dtype).expand(parameter.shape)
    return value.to("cpu", dtype, copy=True)
