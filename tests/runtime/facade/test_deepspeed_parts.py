"""Optimizers, schedules, stop watches, exports and devices under DeepSpeed's names."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zerotrain.runtime as zt
from tests.runtime.facade.test_deepspeed_names import engine_with, train
from tests.support.free_form import config
from tests.support.tiny_models import TinyGPT, token_batches
from zerotrain.contract.config import load, resolve
from zerotrain.runtime import deepspeed
from zerotrain.runtime.deepspeed import OnDevice, utils
from zerotrain.runtime.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zerotrain.runtime.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zerotrain.runtime.deepspeed.ops.lamb import FusedLamb
from zerotrain.runtime.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from zerotrain.runtime.deepspeed.runtime import lr_schedules
from zerotrain.runtime.deepspeed.utils import zero_to_fp32
from zerotrain.runtime.optim.schedule import LrSchedule

pytestmark = pytest.mark.unit


def trained(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TinyGPT(layers=1)
    if "optimizer" in more:
        more["optimizer"] = more["optimizer"](model.parameters())
    engine, *_ = zt.initialize(model=model, config=settings, **more)
    train(engine, 3)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.close()
    return weights


@pytest.mark.parametrize(
    ("kind", "params", "make"),
    [
        ("Lamb", {"lr": 0.01, "weight_decay": 0.1, "max_coeff": 5.0}, FusedLamb),
        ("Lion", {"lr": 0.001, "weight_decay": 0.1, "betas": [0.8, 0.9]}, FusedLion),
        ("Lion", {"lr": 0.001}, DeepSpeedCPULion),
        ("Adagrad", {"lr": 0.01}, DeepSpeedCPUAdagrad),
    ],
)
def test_an_optimizer_object_trains_as_the_configured_one(kind: str, params: Any, make: Any) -> None:
    configured = trained({**config(0), "optimizer": {"type": kind, "params": params}})
    settings = {key: value for key, value in config(0).items() if key != "optimizer"}
    given = trained(settings, optimizer=lambda parameters: make(parameters, **params))
    assert given.keys() == configured.keys()
    assert all(torch.equal(given[name], value) for name, value in configured.items())


def test_what_an_optimizer_object_cannot_do_is_named() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(RuntimeError, match=r"pass it to initialize\(optimizer=\.\.\.\)"):
        FusedLion(parameters).step()
    with pytest.raises(ValueError, match=r"max_grad_norm must be 0, got 1\.0: .*gradient_clipping"):
        FusedLamb(parameters, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="amsgrad must be False"):
        FusedLamb(parameters, amsgrad=True)
    with pytest.raises(TypeError, match=r"no argument \['beta'\]"):
        FusedLamb(parameters, beta=0.9)


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_max_lr": 0.02, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


def test_valid_schedules_are_those_with_a_class() -> None:
    assert sorted(lr_schedules.VALID_LR_SCHEDULES) == sorted(SCHEDULES)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_object_gives_the_rates_of_the_configuration(kind: str) -> None:
    values = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": kind, "params": SCHEDULES[kind]},
    }
    groups = [{"lr": 0.05, "betas": (0.9, 0.999)}]
    configured = LrSchedule(groups, resolve(load(values), world_size=1).scheduler)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.05)
    schedule = getattr(lr_schedules, kind)(optimizer, **SCHEDULES[kind])
    for step in range(12):
        assert schedule.get_last_lr() == schedule.get_lr() == configured.get_last_lr()
        assert optimizer.param_groups[0]["betas"] == groups[0]["betas"]
        assert schedule.last_batch_iteration == step - 1
        schedule.step()
        configured.step()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.05)
    other = getattr(lr_schedules, kind)(optimizer, **SCHEDULES[kind])
    other.load_state_dict(schedule.state_dict())
    assert other.get_lr() == configured.get_last_lr()
    other.step(5)
    assert other.last_batch_iteration == 5


def test_the_engine_steps_a_schedule_object() -> None:
    torch.manual_seed(0)
    model = TinyGPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = lr_schedules.WarmupLR(optimizer, 0.0, 0.02, warmup_num_steps=4, warmup_type="linear")
    engine, *_ = zt.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config(0))
    rates = []
    for batch in token_batches(6, size=1):
        engine.backward(engine(*batch))
        rates.append(engine.get_lr()[0])
        engine.step()
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.015, 0.02])
    engine.close()


def test_wrong_arguments_of_a_schedule_are_named() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    with pytest.raises(TypeError, match=r"WarmupDecayLR needs \['total_num_steps'\]"):
        lr_schedules.WarmupDecayLR(optimizer)
    with pytest.raises(TypeError, match=r"WarmupLR has no argument \['warmup'\]"):
        lr_schedules.WarmupLR(optimizer, warmup=3)


def test_the_optimizer_reports_the_last_step() -> None:
    engine = engine_with(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    optimizer = engine.optimizer
    assert (optimizer.overflow, optimizer.loss_scale, optimizer.cur_scale) == (False, 16.0, 16.0)
    batch = token_batches(1, size=1)[0]
    engine.backward(engine(*batch) * float("inf"))
    engine.step()
    assert (optimizer.overflow, optimizer.loss_scale, optimizer.cur_scale) == (True, 8.0, 8.0)
    train(engine, 1)
    assert (optimizer.overflow, optimizer.cur_scale) == (False, engine.loss_scale())
    engine.close()


def test_stop_watches_and_the_monitor(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    timers = engine.timers
    assert timers is engine.timers
    timers("data").start()
    with pytest.raises(RuntimeError, match="'data' runs already"):
        timers("data").start()
    timers("data").stop()
    with pytest.raises(RuntimeError, match="'data' does not run"):
        timers("data").stop()
    assert timers.has_timer("data")
    assert not timers.has_timer("other")
    assert timers("data").mean() == timers("data").elapsed(reset=False) > 0
    with caplog.at_level(logging.INFO, logger="zerotrain"):
        timers.log(["data", "other"])
    assert caplog.messages[-1].startswith("time (ms) | data: ")
    assert timers("data").elapsed() == 0.0
    assert engine.monitor.enabled is False
    engine.monitor.write_events([("loss", 1.0, 1)])
    engine.close()


def test_a_loader_for_other_data() -> None:
    engine = engine_with(train_micro_batch_size_per_gpu=2)
    data = TensorDataset(torch.arange(12))
    assert [len(batch) for (batch,) in engine.deepspeed_io(data)] == [2] * 6
    assert [len(batch) for (batch,) in engine.deepspeed_io(data, batch_size=4)] == [4] * 3
    same = engine.deepspeed_io(
        data, route="train", pin_memory=True, data_sampler=None, num_local_io_workers=0
    )
    assert [len(batch) for (batch,) in same] == [2] * 6
    engine.close()


def test_the_configuration_reads_as_it_was_written() -> None:
    engine = engine_with(bf16={"enabled": True})
    assert engine.config.get("zero_optimization", {}).get("stage", None) == 0
    assert engine.config["bf16"]["enabled"] is engine.bfloat16_enabled() is True
    assert "fp16" not in engine.config
    assert engine.config.batch.micro_batch_size == engine.config["train_micro_batch_size_per_gpu"] == 1
    engine.close()


def test_consolidated_weights_and_older_names(tmp_path: Path) -> None:
    engine = engine_with()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert state is not None
    assert state.keys() == engine.module.state_dict().keys()
    assert engine.save_fp16_model(tmp_path) == tmp_path
    assert (tmp_path / "model.safetensors").is_file()
    engine.close()


@pytest.mark.parametrize("name", ["save_16bit_model", "save_fp16_model"])
def test_exports_take_deepspeeds_keywords(tmp_path: Path, name: str) -> None:
    engine = engine_with()
    assert getattr(engine, name)(save_dir=tmp_path, save_filename="pytorch_model.bin") == tmp_path
    assert (tmp_path / "model.safetensors").is_file()
    engine.close()


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("deepspeed_io", {"route": "eval"}, "DistributedSampler"),
        ("deepspeed_io", {"data_sampler": range(2)}, "DistributedSampler"),
        ("deepspeed_io", {"num_local_io_workers": 2}, "num_workers"),
        ("step", {"lr_kwargs": {"epoch": 3}}, "between steps"),
        ("backward", {"release_loss": True}, "del loss"),
    ],
)
def test_keywords_with_another_meaning_are_refused(name: str, given: dict[str, Any], words: str) -> None:
    engine = engine_with()
    positions: dict[str, list[Any]] = {
        "deepspeed_io": [TensorDataset(torch.arange(2))],
        "backward": [torch.ones(1)],
        "step": [],
    }
    ((keyword, value),) = given.items()
    with pytest.raises(ValueError, match=rf"^{keyword} of {name}\(\) must be .*{words}") as caught:
        getattr(engine, name)(*positions[name], **given)
    assert f"got {value!r}" in str(caught.value)
    engine.close()


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 4}}])
def test_the_optimizers_backward_does_not_divide_the_loss(precision: dict[str, Any]) -> None:
    weights = []
    for by_optimizer in (False, True):
        engine = engine_with(gradient_accumulation_steps=2, **precision)
        for batch in token_batches(2, size=1):
            loss = engine(*batch)
            if by_optimizer:
                engine.optimizer.backward(loss / 2, retain_graph=False)
            else:
                engine.backward(loss, release_loss=False)
            engine.step(lr_kwargs={})
        weights.append([value.detach().clone() for value in engine.module.parameters()])
        engine.close()
    for expected, found in zip(*weights, strict=True):
        torch.testing.assert_close(found, expected)


def test_fp32_weights_of_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_with()
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "c", tag="first")
    expected = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    plain = zero_to_fp32.load_state_dict_from_zero_checkpoint(TinyGPT(layers=1), tmp_path / "c", "first")
    assert torch.equal(plain.state_dict()["head.weight"], expected["head.weight"])
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "c", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="safe_serialization must be True"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path / "c", tmp_path / "out", safe_serialization=False
        )


def test_marks_of_leaf_modules() -> None:
    model = TinyGPT(layers=2)
    assert utils.get_z3_leaf_modules(model) == []
    block = model.blocks[0]
    assert utils.set_z3_leaf_modules(model, ["TinyBlock"]) == list(model.blocks)
    assert utils.set_z3_leaf_modules(model, [type(block)]) == list(model.blocks)
    assert utils.z3_leaf_module(block)
    utils.set_z3_leaf_module(block, False)
    assert utils.get_z3_leaf_modules(model) == [model.blocks[1]]
    assert utils.unset_z3_leaf_modules(model, ["tests.support.tiny_models.TinyBlock"]) == list(model.blocks)
    assert utils.get_z3_leaf_modules(model) == []
    with pytest.raises(ValueError, match=r"no module of \['Nothing'\]"):
        utils.set_z3_leaf_modules(model, ["Nothing"])
    assert utils.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    engine, *_ = zt.initialize(model=model, config=config(3))
    with pytest.raises(RuntimeError, match="mark leaf modules before initialize"):
        utils.set_z3_leaf_modules(model, ["TinyBlock"])
    engine.close()


def test_building_on_a_device() -> None:
    with OnDevice(torch.bfloat16, device="cpu"):
        layer = nn.Linear(2, 2)
    assert (layer.weight.dtype, nn.Linear(2, 2).weight.dtype) == (torch.bfloat16, torch.float32)
    with OnDevice(torch.bfloat16, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta
    with OnDevice(torch.float32, device="meta"):
        model = TinyGPT(layers=1)
    assert model.head.weight.is_meta
    engine, *_ = zt.initialize(model=model, config=config(0))
    train(engine, 1)
    engine.close()


def test_copies_for_torch_save() -> None:
    whole = torch.arange(100.0)
    item: dict[str, Any] = {"a": whole[:3], "b": [(whole[5:7], 3)], "c": "text"}
    copy = clone_tensors_for_torch_save(item)
    assert copy["a"].tolist() == [0.0, 1.0, 2.0]
    assert copy["a"].untyped_storage().nbytes() == 12
    assert copy["b"][0][0].untyped_storage().nbytes() == 8
    assert (copy["b"][0][1], copy["c"]) == (3, "text")
    assert np.shares_memory(item["a"].numpy(), whole.numpy())


def test_notices_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = {**config(0), "zero_optimization.reduce_bucket_size": 1024, "steps_per_print": float("inf")}
    for _ in range(2):
        engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=settings)
        engine.close()
    lines = [line for line in caplog.messages if line.startswith("zero_optimization.reduce_bucket_size: ")]
    assert len(lines) == 1


def test_the_accelerator_answers_what_scripts_ask() -> None:
    device = deepspeed.get_accelerator()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(device, name)() >= 0
        assert getattr(device, name)(0) >= 0
    assert device.total_memory() > 0
    device.reset_peak_memory_stats()
    device.empty_cache()
    device.synchronize(0)
    device.range_push("step")
    device.range_pop()
    device.manual_seed_all(3)
    state = device.get_rng_state()
    first = torch.rand(1, device=device.device_name())
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1, device=device.device_name()), first)
    assert device.on_accelerator(first)
    assert device.pin_memory(torch.ones(1)).tolist() == [1.0]
    assert torch.bfloat16 in device.supported_dtypes()
    with pytest.raises(AttributeError, match=r"no 'Event'; .*docs/deepspeed\.md"):
        device.Event  # noqa: B018


def test_seeds_are_set_for_every_generator() -> None:
    deepspeed.runtime.utils.set_random_seed(5)
    first = random.random(), float(np.random.rand()), float(torch.rand(()))
    deepspeed.runtime.utils.set_random_seed(5)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == first
