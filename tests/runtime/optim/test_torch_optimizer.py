"""The optimizers of `initialize` and `shard` as torch's: hooks, groups, states, state dicts, scalers."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torchs

import zerotrain.runtime as zt
from zerotrain.runtime.optim.groups import GroupError
from zerotrain.runtime.shard_api import ShardedOptimizer

pytestmark = pytest.mark.unit

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@contextmanager
def made(how: str, **further: Any) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Provide (model, optimizer, function that does one step)."""
    net = model()
    optimizer: Any
    if how == "shard":
        _, optimizer = zt.shard(net, CONFIG, **further)
        engine = optimizer.engine
    else:
        engine, optimizer, *_ = zt.initialize(model=net, config=CONFIG, **further)

    def step() -> None:
        engine.backward(engine(torch.ones(1, 4)).square().sum())
        optimizer.step() if how == "shard" else engine.step()

    yield net, optimizer, step
    engine.close()


BOTH = pytest.mark.parametrize("how", ["shard", "initialize"])


@BOTH
def test_it_is_one(how: str) -> None:
    with made(how) as (net, optimizer, _):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups[0]["params"] == list(net.parameters())
        assert optimizer.defaults["lr"] == 1e-2
        assert "lr: 0.01" in repr(optimizer)


@BOTH
def test_groups_are_the_dicts_that_the_engine_reads(how: str) -> None:
    with made(how) as (net, optimizer, step):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        step()
        assert all(map(torch.equal, before, net.parameters()))


@BOTH
def test_hooks_run_around_every_update(how: str) -> None:
    with made(how) as (net, optimizer, step):
        seen: list[tuple[str, Any]] = []
        weight = net.get_parameter("0.weight")

        def before(which: Any, args: Any, kwargs: Any) -> None:
            assert which is optimizer
            seen.append(("before", weight.detach().clone()))
            assert zt.get_full_grad(weight).norm() > 0

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: seen.append(("after", weight.detach().clone()))),
            torchs.register_optimizer_step_pre_hook(lambda which, *_: seen.append(("any", which))),
        ]
        step()
        for handle in handles:
            handle.remove()
        step()
        assert [name for name, _ in seen] == ["any", "before", "after"]
        assert seen[0][1] is optimizer
        assert not torch.equal(seen[1][1], seen[2][1])


def test_hooks_of_the_script_s_own_optimizer_go_on() -> None:
    net, seen = model(), []
    given = torch.optim.AdamW(net.parameters())
    given.register_step_pre_hook(lambda *_: seen.append("before"))
    with zt_engine(net, given) as engine:
        given.register_step_post_hook(lambda *_: seen.append("after"))
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    assert seen == ["before", "after"]


@contextmanager
def zt_engine(net: nn.Module, given: torch.optim.Optimizer) -> Iterator[Any]:
    engine, *_ = zt.initialize(model=net, config={"train_batch_size": 1}, optimizer=given)
    yield engine
    engine.close()


def test_zero_grad_of_the_script_s_own_optimizer_drops() -> None:
    net = model()
    given = torch.optim.SGD(net.parameters(), lr=0.1)
    with zt_engine(net, given) as engine:
        engine.backward(engine(torch.full((1, 4), 1e3)).square().sum())
        given.zero_grad()
        assert engine.step().grad_norm == 0.0


@BOTH
def test_states_are_elsewhere(how: str) -> None:
    with made(how) as (net, optimizer, step):
        step()
        assert len(optimizer.state) == 0
        with pytest.raises(KeyError, match="get_full_optimizer_state"):
            optimizer.state[net.get_parameter("0.weight")]


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, weight: optimizer.state.clear(),
        lambda optimizer, weight: optimizer.state.pop(weight, None),
        lambda optimizer, weight: optimizer.state.update({weight: {}}),
        lambda optimizer, weight: optimizer.state.__setitem__(weight, {"exp_avg": weight}),
        lambda optimizer, weight: setattr(optimizer, "state", defaultdict(dict)),
    ],
)
def test_states_that_are_written_are_refused(how: str, change: Any) -> None:
    with made(how) as (net, optimizer, _), pytest.raises(RuntimeError, match="set_full_optimizer_state"):
        change(optimizer, net.get_parameter("0.weight"))


def test_the_script_s_own_optimizer_is_another_name_of_the_engine_s() -> None:
    net = model()
    given = torch.optim.AdamW([{"params": net.get_submodule("0").parameters()}], lr=0.1)
    net.get_submodule("1").requires_grad_(False)
    with zt_engine(net, given) as engine:
        before = given.state_dict()
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert given.state_dict() == engine.optimizer.state_dict()
        with pytest.raises(KeyError, match="get_full_optimizer_state"):
            given.state[net.get_parameter("0.weight")]
        with pytest.raises(RuntimeError, match="set_full_optimizer_state"):
            given.state.clear()
        with pytest.raises(RuntimeError, match=r"0 updates there, 1 here.*engine\.load_checkpoint"):
            given.load_state_dict(before)
        state = given.state_dict()
        state["param_groups"][0]["lr"] = 0.0
        given.load_state_dict(state)
        given.add_param_group({"params": net.get_submodule("1").parameters(), "lr": 0.0})
        net.requires_grad_(True)
        weights = [each.detach().clone() for each in net.parameters()]
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert all(map(torch.equal, weights, net.parameters())), "rates of 0 came through it"
        given.param_groups[1]["lr"] = 0.1
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert not torch.equal(weights[2], net.get_parameter("1.weight"))


def test_a_torch_optimizer_on_shards_is_handed_over_before_its_first_step() -> None:
    net = model()
    given = torch.optim.RMSprop(net.parameters(), lr=0.1)
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True}
    engine, *_ = zt.initialize(model=net, config=config, optimizer=given)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    assert given.state_dict() == engine.optimizer.state_dict()
    engine.close()


def replace_groups(optimizer: Any) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def move_a_parameter(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def swap_parameters(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def write_no_number(optimizer: Any) -> None:
    optimizer.param_groups[1]["weight_decay"] = "none"


@pytest.mark.parametrize("how", ["shard", "initialize", "given"])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (replace_groups, "replaced by another list"),
        (move_a_parameter, r"param_groups\[0\]\['params'\] must hold the 2 parameters"),
        (swap_parameters, r"param_groups\[0\]\['params'\] must hold the 2 parameters"),
        (write_no_number, "must hold numbers.*'weight_decay': 'none'"),
    ],
)
def test_edits_of_groups_that_would_have_no_effect_are_refused(how: str, edit: Any, words: str) -> None:
    net = model()
    groups = [{"params": list(part.parameters())} for part in net]
    given = torch.optim.AdamW(groups, lr=0.1) if how == "given" else None
    engine, made_here, *_ = zt.initialize(
        model=net, config=CONFIG, optimizer=given, model_parameters=None if given else groups
    )
    optimizer = ShardedOptimizer(engine) if how == "shard" else made_here
    engine.backward(engine(torch.ones(1, 4)).sum())
    edit(given or optimizer)
    with pytest.raises(GroupError, match=words):
        engine.step()
    engine.close()


@BOTH
def test_a_state_dict_restores_the_groups_and_never_loses_moments(how: str) -> None:
    with made(how) as (_, optimizer, step):
        fresh = optimizer.state_dict()
        assert json.loads(json.dumps(fresh))["param_groups"][0]["params"] == [0, 1, 2, 3]
        optimizer.load_state_dict(fresh)
        groups = optimizer.param_groups
        step()
        with pytest.raises(RuntimeError, match=r"0 updates there, 1 here.*save_checkpoint"):
            optimizer.load_state_dict(fresh)
        later = optimizer.state_dict()
        group = optimizer.param_groups[0]
        group["lr"] = 5.0
        seen: list[str] = []
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
        optimizer.load_state_dict(later)
        assert seen == ["before", "after"]
        assert optimizer.param_groups is groups
        assert group["lr"] == 1e-2
        with pytest.raises(ValueError, match=r"groups of \[3\] parameters, this optimizer of \[4\]"):
            optimizer.load_state_dict({**later, "param_groups": [{**group, "params": [0, 1, 2]}]})


@BOTH
def test_the_states_of_a_plain_optimizer_are_refused(how: str) -> None:
    net = model()
    plain = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    plain.step()
    with made(how) as (_, optimizer, _), pytest.raises(RuntimeError, match="set_full_optimizer_state"):
        optimizer.load_state_dict(plain.state_dict())


@BOTH
def test_it_cannot_be_copied_or_pickled(how: str) -> None:
    with made(how) as (_, optimizer, _):
        for way in (copy.copy, copy.deepcopy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
            with pytest.raises(TypeError, match=r"engine\.save_checkpoint"):
                way(optimizer)


@BOTH
def test_groups_can_be_added(how: str) -> None:
    net = model()
    net[1].requires_grad_(False)
    trained = list(net[0].parameters())
    optimizer: Any
    if how == "shard":
        _, optimizer = zt.shard(net, CONFIG, model_parameters=trained)
        engine = optimizer.engine
    else:
        engine, optimizer, *_ = zt.initialize(model=net, config=CONFIG, model_parameters=trained)
    optimizer.add_param_group({"params": list(net[1].parameters()), "lr": 1.0})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1.0]
    with pytest.raises(GroupError, match=r"'0\.weight' is in groups 0 and 2"):
        optimizer.add_param_group({"params": trained})
    engine.close()


def test_a_closure_gives_its_loss() -> None:
    with made("shard") as (net, optimizer, _):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(torch.ones(1, 4)).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert optimizer.step(closure) > 0.0
        assert optimizer.engine.last_step.grad_norm > 0.0


def test_a_scaler_that_is_off() -> None:
    with made("shard") as (net, optimizer, _):
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(net(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        result: Any = scaler.step(optimizer)
        assert result.step == 1
        scaler.update()


def test_the_engine_s_optimizer_leaves_the_step_to_the_engine() -> None:
    refused = pytest.raises(RuntimeError, match=r"call engine\.step\(\)")
    with made("initialize") as (_, optimizer, _), refused:
        optimizer.step()
