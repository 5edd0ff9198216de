"""DeepSpeed's ways to call `initialize`, the process group made first, and a loop that the user owns."""

from __future__ import annotations

import copy
import pickle
import threading
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import Case, whole_parameters, world
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.optim.groups import GroupError
from zerotrain.runtime.zero.layout import LayoutError

CONFIG = {"train_micro_batch_size_per_gpu": 1}


@pytest.mark.unit
def test_positions_and_older_names() -> None:
    for engine, *_ in (
        zt.initialize(None, nn.Linear(2, 2), None, None, None, None, 29500, None, None, None, CONFIG),
        zt.initialize(Namespace(deepspeed_config=CONFIG), nn.Linear(2, 2)),
        zt.initialize(model=nn.Linear(2, 2), config_params=CONFIG),
        zt.initialize(args=Namespace(local_rank=0), model=nn.Linear(2, 2), config=CONFIG),
    ):
        assert engine.train_micro_batch_size_per_gpu() == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ConfigError, "must be given"),
        ({"config": CONFIG, "args": Namespace(deepspeed_config="a.json")}, ConfigError, "one place"),
        ({"config": CONFIG, "mesh_param": (1, 2)}, ConfigError, "sequence parallelism"),
        ({"config": CONFIG, "dist_init_required": False}, ValueError, "dist_init_required"),
        ({"config": CONFIG, "model": "bert"}, TypeError, "nn.Module"),
        ({"config": CONFIG, "model": Namespace(module=nn.Linear(2, 2))}, TypeError, "pass its module"),
        ({"config": CONFIG, "modle": None}, TypeError, "modle"),
    ],
)
def test_wrong_calls_are_named(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        zt.initialize(**{"model": nn.Linear(2, 2), **given})


@pytest.mark.unit
def test_wrong_parameters_are_named() -> None:
    model = nn.Linear(2, 2)
    cases: tuple[tuple[Any, str], ...] = (
        (iter(()), "empty"),
        ("abc", "got str"),
        ([model.weight], r"leaves out .*'bias'"),
        ([("weight", 3), ("bias", 4)], "got list of tuple; pass model.parameters"),
        ([{"lr": 0.1}], r"group 0 must have params; got \['lr'\]"),
        ([{"params": [model.weight, "bias"]}], r"params of parameter group 0 .* got \['Parameter', 'str'\]"),
        ([{"params": [model.weight, ("bias", model.bias)]}], r"got \['Parameter', 'tuple'\]"),
    )
    for parameters, words in cases:
        for optimizer in (None, torch.optim.AdamW):
            given = copy.copy(parameters)
            with pytest.raises(GroupError, match=words):
                zt.initialize(model=model, config=CONFIG, model_parameters=given, optimizer=optimizer)


def complex_weight() -> nn.Module:
    model = nn.Linear(2, 2)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def traced(module: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.trace(module, torch.ones(1, 2))  # type: ignore[no-untyped-call]
    return made


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))


def traced_in_a_list() -> nn.Module:
    return nn.Sequential(nn.ModuleList([traced(nn.Linear(2, 2))]))


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (complex_weight, "parameter 'phase' is of torch.complex64.*view_as_real"),
        (made_in_inference_mode, "parameter 'weight' was made within torch.inference_mode"),
        (scripted, "module '1' of the model is made by torch.jit.script"),
        (traced_in_a_list, "module '0.0' of the model is made by torch.jit.script or torch.jit.trace"),
    ],
)
def test_models_that_cannot_be_trained_are_named(build: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        zt.initialize(model=build(), config=CONFIG)


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_without_parameters_train() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Tanh()))
    model.append(nn.Sequential(nn.ModuleList([traced(nn.Tanh())])))
    engine, *_ = zt.initialize(model=model, config=CONFIG)
    engine.backward(model[:2](torch.ones(1, 2)).sum())
    engine.step()
    engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("loss", [1.0, [torch.ones(())], None])
def test_a_loss_that_is_no_tensor_is_named(loss: Any) -> None:
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(TypeError, match=f"loss must be a tensor with one element; got {type(loss).__name__}"):
        engine.backward(loss)
    engine.close()


def pairs_of(model: nn.Module, form: str) -> Any:
    pairs = list(model.named_parameters())
    grouped = [{"params": pairs[:1], "lr": 0.1}, {"params": (pair for pair in pairs[1:]), "lr": 0.2}]
    return grouped if form == "groups" else iter(pairs) if form == "generator" else pairs


@pytest.mark.unit
@pytest.mark.parametrize("form", ["generator", "list", "groups"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.RMSprop])
def test_named_parameters_are_taken_as_torch_takes_them(tmp_path: Path, form: str, optimizer: Any) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    plain = copy.deepcopy(model)
    reference = (optimizer or torch.optim.SGD)(pairs_of(plain, form), lr=0.01)
    plain(inputs).sum().backward()
    reference.step()
    settings: dict[str, Any] = {**CONFIG, "zero_allow_untested_optimizer": True}
    if optimizer is None:
        settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.01}}
    maker = None if optimizer is None else partial(optimizer, lr=0.01)
    engine, made, *_ = zt.initialize(
        model=model, config=settings, model_parameters=pairs_of(model, form), optimizer=maker
    )
    engine.backward(engine(inputs).sum())
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    names = [group["param_names"] for group in made.param_groups]
    assert names == [group["param_names"] for group in reference.param_groups]
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_neither_copied_nor_pickled(make: Any) -> None:
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(TypeError, match=r"must not be copied or pickled.*save_checkpoint"):
        make(engine)
    engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("given", [None, torch.optim.AdamW])
def test_edits_of_groups_without_effect_are_named(given: Any) -> None:
    engine, optimizer, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG, optimizer=given)
    group = optimizer.param_groups[0]
    for key, value in (("amsgrad", True), ("maximize", True)):
        group[key] = value
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(GroupError, match=rf"param_groups\[0\]\['{key}'\] must stay False .* got True"):
            engine.step()
        group[key] = False
        engine.step()
    group["scale_of_the_script"] = 2.0
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.backward(engine(torch.ones(1, 2)).sum())
    optimizer.param_groups.clear()
    with pytest.raises(GroupError, match=r"param_groups must hold the 1 groups .* got 0"):
        engine.step()


@pytest.mark.unit
def test_a_model_has_one_engine_at_a_time() -> None:
    model = nn.Linear(2, 2)
    engine, *_ = zt.initialize(model=model, config=CONFIG)
    with pytest.raises(LayoutError, match=r"'weight' belongs to an engine already; close\(\) that one first"):
        zt.initialize(model=model, config=CONFIG)
    engine.close()
    engine, *_ = zt.initialize(model=model, config=CONFIG)
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert engine.step().grad_norm > 0


def refused() -> list[int]:
    """Return the number of threads after each call of `initialize` that raises once the groups are made."""
    threads = []
    for _ in range(3):
        with pytest.raises(ConfigError):
            zt.initialize(model=nn.Linear(2, 2), config={**CONFIG, "optimizer": {"type": "none such"}})
        threads.append(threading.active_count())
    return threads


@pytest.mark.ranks
def test_a_refused_call_leaves_nothing_behind() -> None:
    for threads in run_ranks(2, refused):
        assert len(set(threads)) == 1


def group_first() -> tuple[int, int]:
    """Make the group first on one rank without a launcher, then an engine on top."""
    zt.init_distributed()
    zt.init_distributed(dist_backend="gloo", verbose=False)  # a second call changes nothing
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.close()
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.ranks
def test_the_process_group_first() -> None:
    assert run_ranks(1, group_first) == [(0, 1)]


def by_engine(stage: int, dtype: str, accumulation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights after the engine's loop and after a plain one."""
    case = Case(stage=stage, dtype=dtype, accumulation=accumulation)
    world_size = world()[1]
    batches = [
        tuple(part.chunk(world_size)[world()[0]] for part in batch)
        for batch in token_batches(2 * accumulation, size=2)
    ]
    settings = {**case.config(world_size), "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 4}}
    engine, *_ = zt.initialize(model=case.model(), config=settings)
    for batch in batches:
        engine.backward(engine(*batch))
        engine.step()
    model, optimizer = zt.shard(case.model(), settings)
    for index, batch in enumerate(batches):
        loss = model(*batch) / accumulation
        (optimizer.scale(loss) if dtype == "fp16" else loss).backward()
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = []
    for module in (engine.module, model):
        with zt.full_parameters(module):
            found.append(whole_parameters(module))
    return found[0], found[1]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_of_ones_own(stage: int) -> None:
    for dtype, accumulation in (("fp32", 2), ("bf16", 1), ("fp16", 1)):
        for expected, got in run_ranks(2, by_engine, stage, dtype, accumulation):
            for name, value in expected.items():
                assert np.array_equal(got[name], value), f"{dtype}: {name}"


def forgotten_scale() -> None:
    settings = {**CONFIG, "fp16": {"enabled": True}}
    model, optimizer = zt.shard(nn.Linear(2, 2), settings)
    model(torch.ones(1, 2).half()).sum().backward()
    optimizer.step()


@pytest.mark.ranks
def test_an_unscaled_fp16_loss_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"fp16 gradients need a scaled loss"):
        run_ranks(1, forgotten_scale)


def cleared() -> float:
    """Return the norm after `zero_grad` before a step, which drops earlier gradients as in torch."""
    model, optimizer = zt.shard(nn.Linear(2, 1, bias=False), CONFIG)
    model(torch.full((1, 2), 100.0)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return optimizer.step().grad_norm


@pytest.mark.ranks
def test_zero_grad_forgets() -> None:
    assert run_ranks(1, cleared)[0] == pytest.approx(2**0.5)
