"""Models that an engine evaluates for a while before they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zerotrain.runtime.construct.expressions import Expression
from zerotrain.runtime.construct.pending import expression_of, is_pending, make_pending
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel


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
    owners = (owner_of(parameter) for parameter in model.parameters())
    return any(isinstance(owner, ShardedModel) and not owner.is_closed for owner in owners)


def is_lent(model: nn.Module) -> bool:
    """Return whether `lend` gave the model to an engine that has it still."""
    return model in _lent


def lend(model: nn.Module, initialize: Callable[[], Any]) -> nn.Module:
    """Let `initialize` make an engine that only evaluates the model; return the model, whose calls are the
    engine's. Collective, as is `give_back`.

    Parameters whose values are not read yet take no memory besides the engine's; the memory of others is
    kept. Raises ValueError for parameters that were made within `zero.Init`, which can be taken over once.
    """
    deferred = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if deferred:
        raise ValueError(
            f"{deferred[0]!r} has no values yet, as the model was made within zero.Init (or on the meta "
            "device), so that it cannot be evaluated before it is trained: train first, or make the model by "
            "from_pretrained or from_config, or without zero.Init"
        )
    before = [_Before.of(parameter) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    for each in before:
        each.parameter.requires_grad_(False)
    _lent[model] = _Loan(initialize(), before, buffers)
    return model


def give_back(model: nn.Module) -> None:
    """End the engine of a lent model, whose parameters and buffers are what they were before."""
    loan = _lent.pop(model)
    loan.engine.close()
    for each in loan.parameters:
        each.restore()
    for current, before in loan.buffers:
        current.update(before)
