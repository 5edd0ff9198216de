"""Uses of a pending parameter give its values; it stays pending unless something keeps or changes them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zerotrain.runtime.construct.expressions import Held
from zerotrain.runtime.construct.pending import PendingParameter, expression_of, is_pending, pending

pytestmark = pytest.mark.unit

Use = Callable[[nn.Parameter], Any]

KEEPS_NOTHING: dict[str, Use] = {
    "shape": lambda p: (tuple(p.shape), p.dtype, p.device, p.requires_grad, p.numel(), p.is_contiguous()),
    "strides": lambda p: (p.stride(), p.stride(0), p.storage_offset()),
    "clone of data": lambda p: p.data.clone(),
    "norm": lambda p: p.detach().norm(dim=1),
    "product": lambda p: p.data @ torch.ones(3, 2),
    "equal": lambda p: torch.equal(p, p),
    "list": lambda p: p.tolist(),
    "number": lambda p: p.sum().item() if not torch.is_grad_enabled() else p.detach().sum().item(),
    "in fp16": lambda p: p.data.half().float(),
    "empty like": lambda p: torch.zeros_like(p),
    "state": lambda p: list(holder(p).state_dict()),
    "frozen": lambda p: p.requires_grad_(False).requires_grad,
    "copy": lambda p: copy.deepcopy(p).detach().clone(),
    "repr": repr,
}
KEEPS: dict[str, Use] = {
    "view": lambda p: p.data[0],
    "transpose": lambda p: p.detach().t(),
    "write": lambda p: p.data.fill_(1),
    "write of rows": lambda p: p.data[1:].zero_(),
    "initialise": lambda p: nn.init.constant_(p, 3),
    "assign": lambda p: setattr(p, "data", torch.ones(2, 3)),
    "numpy": lambda p: p.detach().numpy(),
    "address": lambda p: p.data_ptr() != 0,
    "graph": lambda p: torch.autograd.grad((p * p).sum(), p)[0],
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),  # noqa: S301
    "same": lambda p: p.data.cpu(),
}


def holder(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", parameter)
    return module


def values() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) - 2


def same(one: Any, other: Any) -> bool:
    return str(one) == str(other)


@pytest.mark.parametrize("name", [*KEEPS_NOTHING, *KEEPS])
def test_a_use_gives_what_it_gives_on_a_parameter(name: str) -> None:
    use = (KEEPS_NOTHING | KEEPS)[name]
    plain, unread = nn.Parameter(values()), pending(Held(values()))
    expected, found = use(plain), use(unread)
    assert name == "repr" or same(found, expected)
    assert is_pending(unread) is (name in KEEPS_NOTHING)
    assert torch.equal(unread.detach().clone(), plain.detach())
    assert type(unread) is (PendingParameter if name in KEEPS_NOTHING else nn.Parameter)


def test_an_alias_stays_the_parameters_memory() -> None:
    parameter = pending(Held(values()))
    alias = holder(parameter).state_dict()["weight"]
    with torch.no_grad():
        parameter.add_(1)
    assert torch.equal(alias.clone(), values() + 1)
    alias.mul_(2)
    assert torch.equal(parameter.detach(), 2 * (values() + 1))


def test_a_write_through_an_alias_reaches_the_parameter() -> None:
    parameter = pending(Held(values()))
    alias = parameter.detach()
    alias.mul_(2)
    assert torch.equal(parameter.detach().clone(), 2 * values())


def test_module_to_another_dtype_reads_nothing() -> None:
    parameter = pending(Held(values() / 3))
    module = holder(parameter).to(torch.bfloat16)
    assert is_pending(parameter)
    assert parameter.dtype == torch.bfloat16
    assert module.weight is parameter
    assert torch.equal(parameter.data.clone(), (values() / 3).bfloat16())


def test_use_in_inference_mode_leaves_a_trainable_parameter() -> None:
    parameter = pending(Held(values()))
    with torch.inference_mode():
        view = parameter[0]
    assert not is_pending(parameter)
    (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(view, values()[0])
    assert not parameter.is_inference()


def test_a_copy_is_a_parameter_of_its_own() -> None:
    parameter = pending(Held(values()), requires_grad=False)
    twin = copy.deepcopy(parameter)
    parameter.data.zero_()
    assert is_pending(twin)
    assert not twin.requires_grad
    assert torch.equal(expression_of(twin).whole(), values())
