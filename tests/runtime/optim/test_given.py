"""Optimizers and schedules of the script: torch's classes on shards equal torch on whole parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import (
    GLOBAL_BATCH,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    whole_parameters,
    world,
)
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.offload.resident import ResidentStates
from zerotrain.runtime.optim.groups import GroupError

Maker = Callable[[Any], torch.optim.Optimizer]


class ByAnotherName(torch.optim.Optimizer):
    """Momentum that it updates under another name than the one that stores it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    mean = state["mean"] = torch.zeros_like(parameter)
                else:
                    mean = state["mean"]
                mean.lerp_(parameter.grad, 0.1)
                parameter -= group["lr"] * mean


MAKERS: dict[str, Maker] = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3, betas=(0.8, 0.95), eps=1e-6),
    "Adam": partial(torch.optim.Adam, lr=3e-3, eps=1e-6, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=3e-3),
    "NAdam": partial(torch.optim.NAdam, lr=3e-3, eps=1e-6),
    "RAdam": partial(torch.optim.RAdam, lr=3e-3),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "upwards": partial(torch.optim.Adam, lr=1e-4, maximize=True),  # an option that the engine's Adam lacks
    "two names": ByAnotherName,
}
SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: 1 / (1 + k)),
    "steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.5),
    "cycle": partial(lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=20),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups that alternate within every unit, so that shards are cut into many runs."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")]},
        {"params": [p for name, p in named if not name.endswith("weight")], "lr": 2e-3},
    ]


def settings(world_size: int, stage: int, **further: Any) -> dict[str, Any]:
    config = Case(stage=stage).config(world_size)
    del config["optimizer"]
    return {**config, "zero_allow_untested_optimizer": True, **further}


def train(engine: Any, batches: list[Any]) -> list[float]:
    rank, world_size = world()
    norms = []
    for batch in batches:
        engine.backward(engine(*micro_batches(batch, world_size=world_size, accumulation=1)[0][rank]))
        norms.append(engine.step().grad_norm)
    return norms


def given(name: str, stage: int, folder: str, schedule: str, as_instance: bool) -> Outcome:
    """Train six steps; with a folder, a fresh engine continues after three from a checkpoint."""
    batches = token_batches(6, size=GLOBAL_BATCH)

    def start() -> tuple[TinyGPT, Any]:
        model = Case().model()
        maker = MAKERS[name]
        optimizer: Any = maker(groups_of(model)) if as_instance else maker
        scheduler = SCHEDULES[schedule]
        if as_instance and scheduler is not None:
            scheduler = scheduler(optimizer)
        engine, mine, _, _ = zt.initialize(
            model=model,
            config=settings(world()[1], stage),
            optimizer=optimizer,
            model_parameters=groups_of(model),
            lr_scheduler=scheduler,
        )
        if as_instance:
            assert optimizer.param_groups is mine.param_groups
        return model, engine

    model, engine = start()
    norms = train(engine, batches[:3])
    if folder:
        engine.save_checkpoint(folder)
        model, engine = start()
        engine.load_checkpoint(folder)
    norms += train(engine, batches[3:])
    json.dumps(engine.checkpoint_state().scalars)  # no pickle: everything is plain
    with zt.full_parameters(model):
        return Outcome([], norms, whole_parameters(model))


def reference(name: str, schedule: str, world_size: int) -> Outcome:
    model = Case().model()
    optimizer = MAKERS[name](groups_of(model))
    make = SCHEDULES[schedule]
    scheduler = make(optimizer) if make is not None else None
    norms = []
    for batch in token_batches(6, size=GLOBAL_BATCH):
        optimizer.zero_grad()
        for part in micro_batches(batch, world_size=world_size, accumulation=1)[0]:
            (model(*part) / world_size).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return Outcome([], norms, whole_parameters(model))


def run_all(cases: list[tuple[str, int, str, str, bool]]) -> list[Outcome]:
    return [given(*case) for case in cases]


@pytest.mark.ranks
def test_torchs_optimizers_on_shards(tmp_path: Any) -> None:
    cases = [
        (name, index % 4, str(tmp_path / name) if index % 2 else "", "none", index % 3 == 0)
        for index, name in enumerate(MAKERS)
    ]
    for case, outcome in zip(cases, run_ranks(2, run_all, cases)[0], strict=True):
        expected = reference(case[0], "none", 2)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-3), case
        # Rprop and Adamax take the sign or the largest of gradients, where a last bit can change a step.
        assert largest_difference(outcome, expected) < 2e-4, case


def seen_after_first_step(name: str) -> tuple[set[int], set[int]]:
    """Return storages of the states after the optimizer's first step, and of the engine's streams."""
    model, seen = Case().model(), set[int]()
    optimizer = MAKERS[name](groups_of(model))

    def look(inner: torch.optim.Optimizer, *_: Any) -> None:
        seen.clear()  # of copies that were tried out before
        for state in inner.state.values():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            seen.update(each.untyped_storage().data_ptr() for each in tensors if each.numel() > 1)

    optimizer.register_step_post_hook(look)
    engine, mine, *_ = zt.initialize(model=model, config=settings(1, 2), optimizer=optimizer)
    train(engine, token_batches(1, size=GLOBAL_BATCH))
    resident = [states for states in mine.registry.states.values() if isinstance(states, ResidentStates)]
    streams = [stream for states in resident for stream in states.by_kind.values()]
    return seen, {stream.untyped_storage().data_ptr() for stream in streams}


@pytest.mark.unit
@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"])
def test_states_are_made_in_the_streams(name: str) -> None:
    """Separate states would exist twice until the first step ends."""
    seen, streams = seen_after_first_step(name)
    assert seen
    assert seen <= streams


@pytest.mark.ranks
def test_torchs_schedules(tmp_path: Any) -> None:
    cases = [
        ("AdamW", 2, str(tmp_path / f"{name}{as_instance}"), name, as_instance)
        for name in SCHEDULES
        if name != "none"
        for as_instance in (False, True)
    ]
    for case, outcome in zip(cases, run_ranks(1, run_all, cases)[0], strict=True):
        assert largest_difference(outcome, reference("AdamW", case[3], 1)) < 1e-5, case


def start(maker: Any = None, **further: Any) -> Any:
    return zt.initialize(model=nn.Linear(4, 4), config={"train_batch_size": 1, **further}, optimizer=maker)


@pytest.mark.unit
def test_an_untested_optimizer_needs_the_key() -> None:
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer: must be true for RMSprop"):
        start(torch.optim.RMSprop)
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer: must be true for RMSprop"):
        start(optimizer={"type": "RMSprop"})


class Centered(torch.optim.Optimizer):
    """An optimizer that subtracts a gradient's mean: the update of one element depends on the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * (parameter.grad - parameter.grad.mean())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        (torch.optim.LBFGS, "evaluates the loss several times"),
        (torch.optim.Adafactor, "rows and columns"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (Centered, "changes when a parameter is cut in two"),
    ],
)
def test_optimizers_that_need_whole_parameters_are_refused(maker: Any, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"optimizer: must work element by element.*{reason}.*{maker.__name__}"
    ):
        start(maker, zero_allow_untested_optimizer=True)


@pytest.mark.unit
def test_muon_is_refused_by_name() -> None:
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(ConfigError, match=r"optimizer: must work element by element.*orthogonalises"):
        zt.initialize(
            model=model,
            config={"train_batch_size": 1, "zero_allow_untested_optimizer": True},
            optimizer=torch.optim.Muon(model.parameters(), lr=0.1),
        )


@pytest.mark.unit
def test_other_misuse_names_the_way_out() -> None:
    model = nn.Linear(4, 4)
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    used.step()
    with pytest.raises(ConfigError, match="must not have taken steps yet"):
        zt.initialize(model=model, config={"train_batch_size": 1}, optimizer=used)
    partly = torch.optim.AdamW([model.weight])
    with pytest.raises(GroupError, match="bias"):
        zt.initialize(model=nn.Sequential(model), config={"train_batch_size": 1}, optimizer=partly)
    with pytest.raises(ConfigError, match=r"lr_scheduler: must be a function of the number of steps"):
        zt.initialize(
            model=nn.Linear(4, 4),
            config={"train_batch_size": 1},
            lr_scheduler=lr_scheduler.ReduceLROnPlateau,
        )


def by_name() -> tuple[str, float]:
    optimizer = {"type": "rmsprop", "params": {"lr": 0.5, "alpha": 0.9}}
    engine, mine, *_ = start(optimizer=optimizer, zero_allow_untested_optimizer=True)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return type(mine.rule).__name__, mine.param_groups[0]["alpha"]


@pytest.mark.unit
def test_the_configuration_can_name_one() -> None:
    assert by_name() == ("ForeignRule", 0.9)


@pytest.mark.unit
def test_rates_set_through_either_object_count() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, mine, *_ = zt.initialize(model=model, config={"train_batch_size": 1}, optimizer=optimizer)
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert torch.equal(model.weight, before)
    optimizer.param_groups[0]["lr"] = 1.0
    assert mine.param_groups[0]["lr"] == 1.0
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert torch.equal(model.weight, before - 1.0)


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:Detected call of")  # the first optimizer itself takes no step
def test_a_schedule_over_the_optimizer_of_which_the_given_one_was_made_counts() -> None:
    model = nn.Linear(4, 4)
    first = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = lr_scheduler.LambdaLR(first, lambda step: 0.5**step)
    given = torch.optim.SGD(first.param_groups, lr=1.0)
    engine, mine, *_ = zt.initialize(model=model, config={"train_batch_size": 1}, optimizer=given)
    for rate in (1.0, 0.5, 0.25):
        assert engine.get_lr() == [rate]
        before = model.weight.detach().clone()
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert torch.equal(model.weight, before - rate)
        schedule.step()
    assert mine.param_groups[0] is first.param_groups[0]
