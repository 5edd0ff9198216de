"""Saves, exports and reads hold what every rank wrote alike, and refuse what ranks wrote differently."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zerotrain.runtime as zt
from tests.runtime.facade.test_outside_writes import Net, engine_at, masters, train
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.comm.whole_calls import Call, Meeting
from zerotrain.runtime.engine import Engine

STAGES = (0, 1, 2)
BIAS = "tower.0.bias"


@pytest.mark.unit
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True)])
def test_a_meeting_says_whether_any_rank_has_the_flag(flags: tuple[bool, bool]) -> None:
    store = torch._C._distributed_c10d.HashStore()
    found: list[bool] = []

    def arrive(rank: int, flag: bool) -> None:
        bounds: dict[str, Any] = {"timeout": timedelta(seconds=20), "check": lambda: None}
        call = Call(number=1, rank=rank, what="save_checkpoint", flag=flag)
        meeting = Meeting(store, call, world_size=2, **bounds)
        meeting.wait()
        found.append(meeting.any_flag)

    threads = [threading.Thread(target=arrive, args=each) for each in enumerate(flags)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [any(flags)] * 2


@pytest.mark.unit
def test_a_meeting_with_patience_is_over_without_the_others() -> None:
    store = torch._C._distributed_c10d.HashStore()
    call = Call(number=1, rank=0, what="initialize", flag=False)
    bounds: dict[str, Any] = {"timeout": timedelta(seconds=20), "check": lambda: None}
    meeting = Meeting(store, call, world_size=2, patience=timedelta(0), **bounds)
    assert not meeting.is_completed()
    meeting.wait()
    assert meeting.is_completed()


@contextmanager
def shared_folder(engine: Engine) -> Iterator[Path]:
    """Yield a new folder, the same on every rank."""
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        engine.comm.gather_record([0.0])


@torch.no_grad()
def write(model: Net, *ranks: int) -> None:
    if world()[0] in ranks:
        model.get_parameter(BIAS).fill_(0.125)


def unfreeze(engine: Engine) -> None:
    """Begin to train a frozen parameter, which rebuilds units from what the ranks hold."""
    engine.module.get_parameter("head.bias").requires_grad_(True)
    try:
        engine(torch.arange(10).view(2, 5))
    finally:
        engine.module.get_parameter("head.bias").requires_grad_(False)


def set_another(engine: Engine) -> None:
    weight = engine.module.get_parameter("tower.0.weight")
    zt.set_full_fp32(weight, torch.zeros(weight.shape))


def calls(folder: Path) -> dict[str, Callable[[Engine], object]]:
    """Return what reads or stores whole values."""
    return {
        "save_checkpoint": lambda engine: engine.save_checkpoint(folder),
        "a save in the background": lambda engine: engine.save_checkpoint(folder, asynchronous=True),
        "save_16bit_model": lambda engine: engine.save_16bit_model(folder / "export"),
        "module_state_dict": lambda engine: engine.module_state_dict(),
        "get_full_fp32": lambda engine: zt.get_full_fp32(engine.module.get_parameter(BIAS)),
        "set_full_fp32": set_another,
        "a load that may keep values": lambda engine: engine.load_checkpoint(
            folder, load_module_strict=False
        ),
        "unfreezing": unfreeze,
    }


def at_every_stage(check: Callable[[int, str], list[str]], precision: str) -> dict[int, list[str]]:
    return {stage: check(stage, precision) for stage in STAGES}


def refusals(stage: int, precision: str) -> list[str]:
    """Return the calls that said nothing of a write on rank 1 alone, and whether a load overwrites it."""
    model, engine = engine_at(stage, precision, 0.01)
    train(engine)
    model.get_parameter("head.bias").requires_grad_(False)
    train(engine)
    silent = []
    with shared_folder(engine) as folder:
        engine.save_checkpoint(folder, tag="before")
        before = masters(engine)
        write(model, 1)
        engine.load_checkpoint(folder / "empty")  # which overwrites nothing
        for name, call in calls(folder).items():
            try:
                call(engine)
                silent.append(name)
            except zt.OutsideWrite as error:
                if BIAS not in str(error) or "modifier_rank=0" not in str(error):
                    silent.append(f"{name}: {error}")
        if {path.name for path in folder.glob("*step*")} or (folder / "export").exists():
            silent.append("something was written")
        engine.load_checkpoint(folder, "before")
        if any(not torch.equal(value, before[name]) for name, value in masters(engine).items()):
            silent.append("a load does not overwrite it")
        train(engine)
    engine.close()
    return silent


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_write_on_one_rank_is_neither_read_nor_stored(precision: str) -> None:
    assert run_ranks(2, at_every_stage, refusals, precision) == [{stage: [] for stage in STAGES}] * 2


def kept(stage: int, precision: str) -> list[str]:
    """Return the calls that lost what every rank wrote."""
    model, engine = engine_at(stage, precision, 0.01)
    train(engine)
    lost = []
    with shared_folder(engine) as folder:
        for name, call in calls(folder).items():
            if "load" in name:
                continue
            with torch.no_grad():
                model.get_parameter(BIAS).zero_()
            write(model, 0, 1)
            found = call(engine)
            if isinstance(found, dict):
                found = found[BIAS]
            values = {"itself": found} if isinstance(found, torch.Tensor) else {}
            if name == "save_16bit_model":
                values["file"] = load_file(folder / "export" / "model.safetensors")[BIAS]
            values["master"] = zt.get_full_fp32(model.get_parameter(BIAS))
            lost += [f"{name}: {what}" for what, value in values.items() if not (value == 0.125).all()]
        engine.wait_for_checkpoint()
    engine.close()
    return lost


@pytest.mark.ranks
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_every_rank_wrote_is_read_and_stored(precision: str) -> None:
    assert run_ranks(2, at_every_stage, kept, precision) == [{stage: [] for stage in STAGES}] * 2


def frozen(stage: int) -> list[str]:
    """Return the calls of an engine for evaluation that said nothing."""
    model = Net().requires_grad_(False)
    settings = config(stage)
    settings.pop("optimizer", None)
    engine, *_ = zt.initialize(model=model, config=settings)
    silent = []
    with shared_folder(engine) as folder:
        write(model, 1)
        for name in ("save_checkpoint", "save_16bit_model", "module_state_dict", "get_full_fp32"):
            try:
                calls(folder)[name](engine)
                silent.append(name)
            except zt.OutsideWrite as error:
                silent += [] if BIAS in str(error) else [str(error)]
        with zt.full_parameters(model, modifier_rank=0):
            pass
        engine.save_checkpoint(folder)
    engine.close()
    return silent


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_for_evaluation_refuses_it_too(stage: int) -> None:
    assert run_ranks(2, frozen, stage) == [[], []]


@torch.no_grad()
def while_held() -> list[str]:
    """Read the state dict within `full_parameters` of partitioned weights."""
    model, engine = engine_at(3, "fp32", 0.01)
    found = []
    bias = model.get_parameter(BIAS)
    with zt.full_parameters(model):  # as an evaluation with averaged weights does
        old = bias.clone()
        write(model, 0, 1)
        found.append(str(bool((engine.module_state_dict()[BIAS] == 0.125).all())))
        bias.copy_(old)
    with zt.full_parameters(model, modifier_rank=0):
        write(model, 0)
        try:
            engine.module_state_dict()
        except zt.OutsideWrite as error:
            found.append(str(BIAS in str(error) and "when it ends" in str(error)))
    found.append(str(bool((engine.module_state_dict()[BIAS] == 0.125).all())))
    engine.close()
    return found


@pytest.mark.ranks
def test_partitioned_weights_that_are_held_count_as_whole() -> None:
    assert run_ranks(2, while_held) == [["True"] * 3] * 2
