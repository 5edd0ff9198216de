"""Habits of scripts for DeepSpeed beside training: count, report, make loaders, ask for what is not here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import zerotrain.runtime as zt
from tests.runtime.facade.test_deepspeed_names import engine_with, section, train
from tests.support.free_form import config
from tests.support.tiny_models import TinyGPT, token_batches
from zerotrain.runtime import deepspeed
from zerotrain.runtime.comm.group import is_device
from zerotrain.runtime.facade.missing_names import ABSENT
from zerotrain.runtime.notices import log_once
from zerotrain.runtime.zero.layout import LayoutError

pytestmark = pytest.mark.unit


def test_a_loader_for_other_data_collates_as_for_training() -> None:
    engine, *_ = zt.initialize(model=TinyGPT(layers=1), config=config(0), collate_fn=tuple)
    data = TensorDataset(torch.arange(2))
    assert all(type(batch) is tuple for batch in engine.deepspeed_io(data))
    assert list(engine.deepspeed_io(data, collate_fn=len)) == [1, 1]
    engine.close()


def test_a_step_that_the_script_held_back_was_not_applied() -> None:
    engine = engine_with()
    train(engine, 1)
    assert engine.was_step_applied()
    engine.set_gradient_accumulation_boundary(False)
    train(engine, 1)
    assert not engine.was_step_applied()
    engine.set_gradient_accumulation_boundary(True)
    train(engine, 1)
    assert engine.was_step_applied()
    engine.close()


@pytest.mark.parametrize(
    ("make", "name", "momentum"),
    [
        (torch.optim.SGD, "SGD", 0.5),
        (torch.optim.RMSprop, "RMSprop", 0.5),
        (torch.optim.AdamW, "AdamW", (0.9, 0.999)),
    ],
)
def test_the_optimizer_that_was_passed_is_the_one_that_is_named(make: Any, name: str, momentum: Any) -> None:
    model = TinyGPT(layers=1)
    options = {"lr": 0.1} if name == "AdamW" else {"lr": 0.1, "momentum": momentum}
    settings = {**config(0), "zero_allow_untested_optimizer": True}
    engine, *_ = zt.initialize(model=model, optimizer=make(model.parameters(), **options), config=settings)
    assert (engine.optimizer_name(), engine.get_mom()) == (name, [momentum])
    engine.close()


def test_an_optimizer_that_nobody_named_has_no_name() -> None:
    engine, *_ = zt.initialize(model=TinyGPT(layers=1), config={"train_batch_size": 1})
    assert (engine.optimizer_name(), engine.get_mom()) == (None, [(0.9, 0.999)])
    engine.close()


def test_samples_are_counted_over_restarts(tmp_path: Path) -> None:
    engine = engine_with(gradient_accumulation_steps=2)
    train(engine, 4)
    engine.set_train_batch_size(3)
    train(engine, 3)
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine = engine_with(gradient_accumulation_steps=2)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.global_samples == 0
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, engine.global_samples) == (3, 7)
    train(engine, 2)
    assert engine.global_samples == 9
    engine.close()


def test_the_end_of_an_epoch() -> None:
    engine = engine_with()
    train(engine, 1)
    engine.tput_timer.start()
    engine.tput_timer.stop(global_step=True, report_speed=False)
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    engine.empty_partition_cache()
    train(engine, 1)
    engine.close()


def test_what_was_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    deepspeed.comm.log_summary(show_straggler=True)
    assert caplog.messages == ["[rank 0] sent by TinyGPT: nothing"]
    engine.comm.bytes_sent["all_gather"] = 3 << 20
    deepspeed.comm.log_summary()
    assert caplog.messages[-1] == "[rank 0] sent by TinyGPT: all_gather 3.0 MiB"
    with pytest.raises(ValueError, match=r"return_dict of log_summary\(\) .*bytes_sent"):
        deepspeed.comm.log_summary(return_dict=True)
    assert deepspeed.comm.get_world_group() is None
    engine.close()


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_names_of_an_engine_that_are_not_here_give_the_reason(name: str) -> None:
    assert f"`{name}`" in section("The engine")
    engine = engine_with()
    with pytest.raises(AttributeError, match=rf"^the engine has no {name}: .*docs/deepspeed\.md"):
        getattr(engine, name)
    engine.close()


def test_an_engine_that_is_moved_trains_nothing() -> None:
    engine = engine_with()
    assert engine.to(torch.float64) is engine
    with pytest.raises(LayoutError, match="replaced or moved after initialize"):
        train(engine, 1)
    engine.close()


@pytest.mark.parametrize(
    ("named", "own", "expected"),
    [
        ("cuda", "cuda:1", True),
        ("cuda:1", "cuda:1", True),
        ("cuda:0", "cuda:1", False),
        ("cpu", "cuda:1", False),
        ("cpu:0", "cpu", True),
    ],
)
def test_a_device_without_an_index_is_the_ranks_own(named: str, own: str, expected: bool) -> None:
    assert is_device(torch.device(named), torch.device(own)) is expected


def test_the_optimizer_has_none_within() -> None:
    engine = engine_with()
    with pytest.raises(AttributeError, match=r"no other optimizer within it: .*docs/deepspeed\.md"):
        engine.optimizer.optimizer  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(engine.optimizer, "fp32_partitioned_groups_flat")
    engine.close()


def test_a_backward_of_ones_own_divides_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    batch = token_batches(1, size=1)[0]
    gradients = []
    for is_own in (False, True):
        engine = engine_with(gradient_accumulation_steps=2)
        loss = engine(*batch)
        if is_own:
            loss.backward()
        else:
            assert engine.backward(loss) is loss
        gradients.append(zt.get_full_grad(engine.module.get_parameter("head.weight")))
        engine.close()
    assert torch.allclose(gradients[0] * 2, gradients[1])
    lines = [line for line in caplog.messages if line.startswith("gradient_accumulation_steps 2: ")]
    assert len(lines) == 1


def test_lines_go_to_the_programs_handlers(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.utils.logger.info("a line")
    assert caplog.record_tuples == [("zerotrain.script", logging.INFO, "a line")]
