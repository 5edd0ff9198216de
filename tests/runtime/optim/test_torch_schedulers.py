"""torch's schedules over optimizers of `initialize` and `shard`: rates, betas and warnings are torch's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import SWALR

import zerotrain.runtime as zt

pytestmark = pytest.mark.unit

STEPS = 8
Maker = Callable[[Any], Any]


def sequential(optimizer: Any) -> Any:
    parts = [rates.LinearLR(optimizer, 0.1, total_iters=3), rates.CosineAnnealingLR(optimizer, 5)]
    return rates.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer: Any) -> Any:
    return rates.ChainedScheduler([rates.ConstantLR(optimizer, 0.1, 2), rates.ExponentialLR(optimizer, 0.9)])


SCHEDULES: dict[str, Maker] = {
    "lambda": partial(rates.LambdaLR, lr_lambda=lambda k: 1 / (1 + k)),
    "multiplicative": partial(rates.MultiplicativeLR, lr_lambda=lambda _: 0.9),
    "step": partial(rates.StepLR, step_size=3),
    "multi step": partial(rates.MultiStepLR, milestones=[2, 5]),
    "constant": partial(rates.ConstantLR, total_iters=4),
    "linear": partial(rates.LinearLR, total_iters=4),
    "exponential": partial(rates.ExponentialLR, gamma=0.9),
    "sequential": sequential,
    "polynomial": partial(rates.PolynomialLR, total_iters=6, power=2.0),
    "cosine": partial(rates.CosineAnnealingLR, T_max=5),
    "chained": chained,
    "plateau": partial(rates.ReduceLROnPlateau, patience=1),
    "cyclic": partial(rates.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    "restarts": partial(rates.CosineAnnealingWarmRestarts, T_0=3),
    "one cycle": partial(rates.OneCycleLR, max_lr=1e-2, total_steps=20),
    "swa": partial(SWALR, swa_lr=5e-3, anneal_epochs=4),
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Maker]] = {
    "AdamW": ({"type": "AdamW", "params": {"lr": 1e-2}}, partial(torch.optim.AdamW, lr=1e-2)),
    "SGD": (
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ),
}


def values(optimizer: Any, kind: str) -> list[tuple[float, Any]]:
    key = "betas" if kind == "AdamW" else "momentum"
    return [(float(group["lr"]), group[key]) for group in optimizer.param_groups]


def run(step: Callable[[], object], optimizer: Any, schedule: Any, kind: str) -> list[Any]:
    seen = [values(optimizer, kind)]
    for number in range(STEPS):
        step()
        by_metric = isinstance(schedule, rates.ReduceLROnPlateau)
        schedule.step(*([1.0 if number else 2.0] if by_metric else []))
        seen.append(values(optimizer, kind))
    return seen


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def groups_of(made: nn.Module) -> list[dict[str, Any]]:
    parameters = list(made.parameters())
    return [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2e-3}]


def configured(kind: str) -> dict[str, Any]:
    return {"train_batch_size": 1, "optimizer": OPTIMIZERS[kind][0]}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_and_momentum(name: str, kind: str) -> None:
    plain = OPTIMIZERS[kind][1](groups_of(model()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "step() before optimizer.step()" is one
        expected = run(lambda: plain.step(), plain, SCHEDULES[name](plain), kind)

        sharded, optimizer = zt.shard(made := model(), configured(kind), model_parameters=groups_of(made))

        def own_step() -> None:
            sharded(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        assert run(own_step, optimizer, SCHEDULES[name](optimizer), kind) == expected
        optimizer.engine.close()

        engine, mine, *_ = zt.initialize(
            model=(made := model()), config=configured(kind), model_parameters=groups_of(made)
        )

        def engine_step() -> None:
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()

        assert run(engine_step, mine, SCHEDULES[name](mine), kind) == expected
        engine.close()


def test_a_schedule_over_the_script_s_own_optimizer_sees_the_engine_step() -> None:
    made = model()
    given = torch.optim.AdamW(made.parameters(), lr=1e-2)
    engine, *_ = zt.initialize(model=made, config={"train_batch_size": 1}, optimizer=given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = rates.StepLR(given, 1, gamma=0.5)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        schedule.step()
    assert engine.get_lr() == [5e-3]
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
        given.step()
    engine.close()


def test_shard_steps_the_schedule_that_it_was_given() -> None:
    sharded, optimizer = zt.shard(
        model(), configured("AdamW"), lr_scheduler=partial(rates.StepLR, step_size=1, gamma=0.5)
    )
    for _ in range(2):
        sharded(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    optimizer.engine.close()


def test_a_schedule_s_state_goes_on() -> None:
    _, optimizer = zt.shard(model(), configured("AdamW"))
    schedule = rates.CosineAnnealingLR(optimizer, 5)
    state = copy.deepcopy(schedule.state_dict())
    again = rates.CosineAnnealingLR(optimizer, 5)
    again.load_state_dict(state)
    assert again.state_dict() == schedule.state_dict()
    optimizer.engine.close()


def test_momentum_cycles_only_where_there_is_one() -> None:
    adagrad = {"train_batch_size": 1, "optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}}
    _, optimizer = zt.shard(model(), adagrad)
    with pytest.raises(ValueError, match="momentum"):
        rates.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    optimizer.engine.close()


def test_what_the_script_s_own_schedule_has_is_read_through_the_engine_s() -> None:
    class Counted:
        iteration = 3

        def step(self) -> None:
            self.iteration += 1

        def get_lr(self) -> float:
            return 0.5

    made = zt.initialize(model=nn.Linear(2, 2), config=configured("AdamW"), lr_scheduler=Counted())
    engine, schedule = made[0], cast("Any", made[3])
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert (schedule.iteration, schedule.get_lr()) == (4, 0.5)
    with pytest.raises(AttributeError, match="'Counted' object has no attribute 'nothing'"):
        schedule.nothing  # noqa: B018
    engine.close()


def test_a_script_may_take_the_schedule_over() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = zt.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_batch_size": 1},
        lr_scheduler=rates.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    schedule, engine.lr_scheduler = engine.lr_scheduler, None
    assert engine.lr_scheduler is None
    assert schedule is not None
    for rate in (1.0, 0.5):
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            assert engine.get_lr() == [rate]
        schedule.step()
    with pytest.raises(ValueError, match="pass a schedule to initialize"):
        engine.lr_scheduler = schedule  # type: ignore[assignment]
