"""Parameters that are frozen for some passes between two steps train as in plain torch: nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import EPS, LR, STEPS, check_equal, config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import whole_parameters, world

pytestmark = pytest.mark.ranks

WIDTH = 33
STAGES = (0, 2, 3)


class Net(nn.Module):
    """A body, an adapter beside a frozen matrix, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.adapts = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x) + (self.adapter(x) if self.adapts else 0.0)
        output: torch.Tensor = self.head(torch.tanh(hidden))
        return output


def plain(model: Any) -> Net:
    found: Net = getattr(model, "module", model)
    return found


def inputs(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def freeze(parameters: Iterable[nn.Parameter], *, frozen: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not frozen)


def against_reference(model: Any, x: torch.Tensor, *parts: nn.Module) -> torch.Tensor:
    """Return a loss against the model's own output without its adapter, while `parts` are frozen."""
    net = plain(model)
    net.adapts = False
    for part in parts:
        part.requires_grad_(False)
    reference = model(x).detach()
    for part in parts:
        part.requires_grad_(True)
    net.adapts = True
    loss: torch.Tensor = (model(x) - reference - 1).square().mean()
    return loss


def adapter_frozen(model: Any, step: int, rank: int) -> torch.Tensor:
    return against_reference(model, inputs(step, rank), plain(model).adapter)


def all_frozen(model: Any, step: int, rank: int) -> torch.Tensor:
    return against_reference(model, inputs(step, rank), plain(model).adapter, plain(model).head)


def test_a_reference_pass_with_frozen_parameters_loses_no_moments() -> None:
    check_equal(Net, adapter_frozen, stages=(0, 1, 2, 3))
    check_equal(Net, all_frozen, stages=(0, 3))


def gan_steps(generator: Any, judge: Any, frozen: list[nn.Parameter], update: Any) -> None:
    """Train two models in turn, the judge frozen while the generator is updated."""
    rank, world_size = world()
    for step in range(STEPS):
        ranks = range(world_size) if judge is plain(judge) else (rank,)
        freeze(frozen, frozen=True)
        update(generator, [judge(generator(inputs(step, each))).square().mean() for each in ranks])
        freeze(frozen, frozen=False)
        losses = []
        for each in ranks:
            made = judge(generator(inputs(step, each)).detach())
            losses.append((judge(inputs(step + 50, each)) - 1).square().mean() + (made + 1).square().mean())
        update(judge, losses)


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def engine_update(engine: Any, losses: list[torch.Tensor]) -> None:
    engine.backward(losses[0])
    engine.step()


def gan(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the judge's weights from two engines, and from plain torch."""
    settings = config(stage, optimizer={"type": "Adam", "params": {"lr": LR, "eps": EPS}})
    models, plains = (net(0), net(1)), (net(0), net(1))
    engines = [zt.initialize(model=model, config=settings)[0] for model in models]
    gan_steps(engines[0], engines[1], list(models[1].parameters()), engine_update)
    optimizers: dict[nn.Module, torch.optim.Adam] = {
        model: torch.optim.Adam(model.parameters(), LR, eps=EPS) for model in plains
    }

    def plain_update(model: nn.Module, losses: list[torch.Tensor]) -> None:
        optimizers[model].zero_grad()
        sum(losses, torch.zeros(())).div(len(losses)).backward()  # type: ignore[no-untyped-call]
        optimizers[model].step()

    gan_steps(plains[0], plains[1], list(plains[1].parameters()), plain_update)
    with zt.full_parameters(models[1]):
        found = whole_parameters(models[1])
    for engine in engines:
        engine.close()
    return found, whole_parameters(plains[1])


@pytest.mark.parametrize("stage", with_slow_rows(STAGES, quick=[3]))
def test_a_frozen_model_with_an_engine_of_its_own_passes_gradients_on(stage: int) -> None:
    for found, expected in run_ranks(2, gan, stage):
        for name, value in expected.items():
            assert np.abs(found[name] - value).max() < 1e-5, name


def scaled_gan() -> None:
    """Take a loss through a frozen fp16 model, which needs no scaling of its own."""
    settings = config(2, fp16={"enabled": True, "initial_scale_power": 4})
    generator, judge = (zt.initialize(model=net(seed), config=settings)[0] for seed in (0, 1))
    judge.module.requires_grad_(False)
    generator.backward(judge(generator(inputs(0, 0).half())).float().square().mean())
    assert not generator.step().skipped
    assert generator.last_step is not None
    assert generator.last_step.grad_norm > 0
    generator.close()
    judge.close()


def test_a_frozen_model_asks_for_no_loss_scale() -> None:
    run_ranks(1, scaled_gan)


def accumulated(stage: int, reduce_op: str, measures: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Freeze parts in some micro-batches, at some steps and for good; return weights of engine and torch.

    `measures`: the norm is computed before the step, for which the gradients are reduced.
    """
    rank, world_size = world()
    is_sum = reduce_op == "sum"
    settings = config(stage, gradient_accumulation_steps=2, optimizer={"type": "SGD"})
    settings["optimizer"]["params"] = {"lr": LR, "momentum": 0.9}
    settings["gradient_allreduce_op"] = reduce_op
    model, reference = net(0), net(0)
    engine, *_ = zt.initialize(model=model, config=settings)
    optimizer = torch.optim.SGD(reference.parameters(), LR, momentum=0.9)
    frozen = [(1, 0), (0, 1), (1, 1), (0, 0), (0, 0), (1, 0)]
    """Whether the first weight is frozen in each micro-batch of each step, and when the step is taken."""
    for step, parts in enumerate(frozen):
        for micro, is_frozen in enumerate(parts):
            for each in (model, reference):
                each[0].weight.requires_grad_(not is_frozen)
            engine.backward(engine(inputs(2 * step + micro, rank)).square().mean())
            if measures and micro:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            engine.step()
            for other in range(world_size):
                loss = reference(inputs(2 * step + micro, other)).square().mean()
                (loss / 2 / (1 if is_sum else world_size)).backward()
        if parts == (1, 1):
            optimizer.state.pop(next(reference.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    with zt.full_parameters(model):
        found = whole_parameters(model)
    engine.close()
    return found, whole_parameters(reference)


@pytest.mark.parametrize(
    ("stage", "reduce_op"),
    with_slow_rows(
        [(0, "mean"), (1, "mean"), (2, "mean"), (3, "mean"), (0, "sum"), (1, "sum")],
        quick=[(0, "sum"), (1, "sum"), (3, "mean")],
    ),
)
@pytest.mark.parametrize("measures", [False, True])
def test_only_a_parameter_without_gradient_that_is_frozen_at_the_step_is_dropped(
    stage: int, reduce_op: str, measures: bool
) -> None:
    for found, expected in run_ranks(2, accumulated, stage, reduce_op, measures):
        for name, value in expected.items():
            assert np.abs(found[name] - value).max() < 1e-5, name


def unfrozen_meanwhile(stage: int) -> None:
    """Begin to train the base in a pass in which the adapter is frozen."""
    model = Net()
    adapter, base = cast("nn.Parameter", model.adapter.weight), cast("nn.Parameter", model.base.weight)
    engine, *_ = zt.initialize(model=model, config=config(stage))
    engine.backward(adapter_frozen(engine, 0, world()[0]))
    engine.step()
    before = zt.get_full_optimizer_state(adapter, "exp_avg").clone()
    assert before.abs().max() > 0
    model.base.requires_grad_(True)
    model.adapter.requires_grad_(False)
    engine(inputs(1, 0))
    assert not model.adapter.weight.requires_grad
    assert torch.equal(zt.get_full_optimizer_state(adapter, "exp_avg"), before)
    assert not zt.get_full_optimizer_state(base, "exp_avg").any()
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_new_parameter_beside_a_frozen_one_leaves_its_moments(stage: int) -> None:
    run_ranks(2, unfrozen_meanwhile, stage)
