"""torch.func's transforms and forward-mode differentiation give what they give in plain torch, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import zerotrain.runtime as zt
from tests.support.free_form import config, engine_outcome, reference_outcome
from tests.support.ranks import run_ranks
from tests.support.training import largest_difference

pytestmark = pytest.mark.ranks

WIDTH = 40
REFUSED = "torch.func.grad, vjp, jacrev and hessian, and jvp over parameters, are not possible at stage 3"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Ensemble(Net):
    def forward(self, x: torch.Tensor) -> Any:
        weights = torch.stack([self.first.weight, self.second.weight])
        rows = torch.func.vmap(lambda row: self.second(torch.tanh(self.first(row))))(x)
        return rows + torch.func.vmap(lambda weight: F.linear(x, weight))(weights).sum(0)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def squares(values: Any) -> torch.Tensor:
    result: torch.Tensor = values.square().mean()
    return result


def module_of(model: Any) -> nn.Module:
    found: nn.Module = getattr(model, "module", model)
    return found


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in module.named_parameters()}  # noqa: C416  # for mypy, of tensors


def vmap(model: Any, step: int, rank: int) -> torch.Tensor:
    return squares(torch.func.vmap(model)(inputs(step, rank)))


def vmap_inside(model: Any, step: int, rank: int) -> torch.Tensor:
    return squares(model(inputs(step, rank)))


def vmap_over_samples(model: Any, step: int, rank: int) -> torch.Tensor:
    module = module_of(model)
    values = parameters_of(module)
    call = lambda row: squares(torch.func.functional_call(module, values, (row,)))  # noqa: E731
    return torch.func.vmap(call)(inputs(step, rank)).mean()


def jvp(model: Any, step: int, rank: int) -> torch.Tensor:
    x = inputs(step, rank)
    found: Any = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return squares(found[0]) + squares(found[1])


def forward_mode(model: Any, step: int, rank: int) -> torch.Tensor:
    x = inputs(step, rank)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
        output, tangent = forward_ad.unpack_dual(model(dual))  # type: ignore[no-untyped-call]
        return squares(output) + squares(tangent)


def gradient_of_inputs(model: Any, step: int, rank: int) -> torch.Tensor:
    x = inputs(step, rank)
    return squares(model(x)) + squares(torch.func.vmap(torch.func.grad(lambda row: squares(model(row))))(x))


def gradient_of_parameters(model: Any, step: int, rank: int) -> torch.Tensor:
    module, x = module_of(model), inputs(step, rank)
    call = lambda values: squares(torch.func.functional_call(module, values, (x,)))  # noqa: E731
    found = torch.func.grad(call)(parameters_of(module))
    return squares(model(x)) + sum((squares(each) for each in found.values()), torch.zeros(()))


def jvp_of_parameters(model: Any, step: int, rank: int) -> torch.Tensor:
    module, x = module_of(model), inputs(step, rank)
    model(x)  # from here on a loss may use the parameters themselves
    values = parameters_of(module)
    tangents = {name: torch.full(tuple(value.shape), 0.01) for name, value in values.items()}
    call = lambda values: torch.func.functional_call(module, values, (x,))  # noqa: E731
    found: Any = torch.func.jvp(call, (values,), (tangents,))
    return squares(found[0]) + squares(found[1])


def other_values(model: Any, step: int, rank: int) -> torch.Tensor:
    """Take the model with other parameters, as a teacher, before it runs with its own."""
    module, x = module_of(model), inputs(step, rank)
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    values = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    with torch.no_grad():
        target = torch.func.functional_call(module, values, (x,))
    fast = {name: nn.Parameter(value) for name, value in values.items()}
    return squares(model(x) - target) + squares(torch.func.functional_call(module, {**fast}, (x,)))


Loss = Callable[[Any, int, int], torch.Tensor]
WORK: dict[Loss, type[nn.Module]] = {
    vmap: Net,
    vmap_inside: Ensemble,
    vmap_over_samples: Net,
    jvp: Net,
    forward_mode: Net,
    other_values: Net,
}
WHOLE_ONLY: dict[Loss, type[nn.Module]] = {
    gradient_of_inputs: Net,
    gradient_of_parameters: Net,
    jvp_of_parameters: Net,
}


def differences(stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for loss, build in {**WORK, **WHOLE_ONLY}.items():
        reference = reference_outcome(build, loss, 2)
        if stage == 3 and loss in WHOLE_ONLY:
            found[loss.__name__] = refusal(loss)
            continue
        outcome = engine_outcome(build, loss, stage, None, {})
        gaps = [abs(a - b) for a, b in zip(outcome.losses, reference.losses, strict=True)]
        found[loss.__name__] = max(*gaps, largest_difference(outcome, reference))
    return found


def refusal(loss: Loss) -> str:
    engine, *_ = zt.initialize(model=Net(), config=config(3))
    try:
        loss(engine, 0, engine.rank)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_transforms_equal_plain_torch_or_are_refused(stage: int) -> None:
    for found in run_ranks(2, differences, stage):
        for loss in (*WORK, *WHOLE_ONLY):
            value = found[loss.__name__]
            if stage == 3 and loss in WHOLE_ONLY:
                assert REFUSED in value, loss.__name__
                assert "take stage 2" in value
            else:
                assert value < 2e-6, loss.__name__


def within_full_parameters() -> float:
    """Return the difference of gradients per sample from plain torch's, at stage 3."""
    torch.manual_seed(3)
    model, found = Net(), []
    call = lambda row: squares(model(row))  # noqa: E731
    x = inputs(0, 0)
    found.append(torch.func.vmap(torch.func.grad(call))(x).detach())
    engine, *_ = zt.initialize(model=model, config=config(3))
    with zt.full_parameters(model):
        found.append(torch.func.vmap(torch.func.grad(call))(x).detach())
    engine.backward(squares(engine(x)))
    engine.step()
    engine.close()
    return float((found[0] - found[1]).abs().max())


def test_a_refused_transform_works_within_full_parameters() -> None:
    assert max(run_ranks(2, within_full_parameters)) < 1e-7
