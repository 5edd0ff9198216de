"""Steps return before their updates are done; each use of weights or states waits for exactly those."""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerotrain.runtime as zt
from tests.support.just_in_time import PATIENCE_S, WIDTH, Chain, Run, batch, engine_of, pause_of, train_step
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.updater import runs_just_in_time

Read = Callable[[Engine, nn.Parameter], Any]


def exported(engine: Engine) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        engine.save_16bit_model(folder)
        return next(Path(folder).glob("*.safetensors")).read_bytes()


@torch.no_grad()
def averaged(module: nn.Module) -> list[torch.Tensor]:
    """Average parameters as torch.optim.swa_utils does: one operation on all parameters."""
    averages = [torch.zeros(weight.shape) for weight in module.parameters()]
    torch._foreach_lerp_(averages, list(module.parameters()), 0.5)
    return averages


class Gate:
    """A gate that lets the updates of so many units pass, and the rest once it is opened."""

    def __init__(self, engine: Engine, *, passes: int) -> None:
        self._left = passes
        self._open = threading.Event()
        pause_of(engine, self._pass)

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0 and not self._open.wait(PATIENCE_S):
            raise TimeoutError("nobody opened the gate")

    def open(self, *_: object) -> None:
        self._open.set()


def num_pending(engine: Engine) -> int:
    return sum(unit in engine.core.updates for unit in engine.core.units)


def go_on_during_forward(run: Run) -> None:
    with engine_of(run) as engine:
        train_step(engine, 0)
        engine.synchronize()
        gate = Gate(engine, passes=3)
        train_step(engine, 1)
        assert num_pending(engine) == 4, "step() waited"
        engine.module.get_submodule("blocks.0").register_forward_hook(gate.open)
        train_step(engine, 2)
        assert engine.last_step is not None
        assert engine.last_step.seconds["optimizer_background"] > 0.0


@pytest.mark.unit
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_updates_go_on_during_forward(tier: str) -> None:
    """The last unit's update waits until the first block's forward is over.

    A synchronous step, or a fence that waits for all updates, would never get to that point.
    """
    go_on_during_forward(Run(tier=tier))


def on_ranks() -> None:
    for stage in (1, 2, 3):
        go_on_during_forward(Run(stage=stage))


@pytest.mark.ranks
def test_updates_go_on_during_forward_of_ranks() -> None:
    """Weights may be gathered ahead of use, and replicas published, meanwhile."""
    run_ranks(2, on_ranks)


@pytest.mark.unit
def test_units_wait_for_their_own_update_alone() -> None:
    with engine_of(Run()) as engine:
        train_step(engine, 0)
        engine.synchronize()
        gate, pending = Gate(engine, passes=2), []
        for index in range(4):
            block = engine.module.get_submodule(f"blocks.{index}")
            block.register_forward_hook(lambda *_: pending.append(num_pending(engine)))
        engine.module.get_submodule("blocks.1").register_forward_hook(gate.open)
        train_step(engine, 1)
        engine(batch(0))
        assert pending[-4:] == [3, 2, 1, 0]


def doze() -> None:
    """Sleep before each unit's update, so that code without a fence reads too early."""
    time.sleep(0.02)


READS: dict[str, Read] = {
    "sum": lambda _, weight: weight.detach().sum(),
    "data": lambda _, weight: weight.data.clone(),
    "repr": lambda _, weight: repr(weight),
    "deepcopy": lambda _, weight: copy.deepcopy(weight),
    "numpy": lambda _, weight: weight.detach().float().cpu().numpy().copy(),
    "state_dict": lambda engine, _: copy.deepcopy(engine.module.state_dict()),
    "module_state_dict": lambda engine, _: engine.module_state_dict(),
    "full_fp32": lambda _, weight: zt.get_full_fp32(weight),
    "local_fp32": lambda _, weight: zt.get_local_fp32(weight),
    "state": lambda _, weight: zt.get_full_optimizer_state(weight, "exp_avg"),
    "checkpoint": lambda engine, _: engine.checkpoint_state().scalars["optimizer"],
    "scalars": lambda engine, _: engine.optimizer.scalars(),
    "export": lambda engine, _: exported(engine),
    "evaluation": lambda engine, _: engine(batch(7)),
    "twice": lambda _, weight: torch.stack([weight, weight]).sum(),
    "of one unit": lambda engine, weight: functional.linear(
        torch.ones(1, WIDTH), weight, engine.module.get_parameter("blocks.3.bias")
    ),
    "average": lambda engine, _: averaged(engine.module),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", READS)
def test_reads_right_after_a_step_see_its_result(name: str) -> None:
    seen = []
    for just_in_time in (True, False):
        with engine_of(Run(just_in_time=just_in_time, dtype="fp32")) as engine:
            train_step(engine, 0)
            if just_in_time:
                pause_of(engine, doze)
            train_step(engine, 1)
            seen.append(repr(READS[name](engine, engine.module.get_parameter("blocks.3.weight"))))
    assert seen[0] == seen[1]


@pytest.mark.unit
def test_gradients_are_gone_after_a_step_and_come_back() -> None:
    with engine_of(Run(dtype="fp32")) as engine:
        weight = engine.module.get_parameter("blocks.0.weight")
        gate = Gate(engine, passes=0)
        train_step(engine, 0)
        assert weight.grad is None
        gate.open()
        engine.backward(engine(batch(1)))
        gradient: Any = weight.grad
        assert gradient.abs().sum() > 0.0


@pytest.mark.unit
def test_zero_grad_after_a_step_waits_for_nothing() -> None:
    with engine_of(Run()) as engine:
        gate = Gate(engine, passes=0)
        train_step(engine, 0)
        engine.zero_grad()
        engine.optimizer.zero_grad()
        assert num_pending(engine) == 4
        gate.open()


@pytest.mark.unit
def test_memory_reports_wait_without_other_ranks() -> None:
    with engine_of(Run()) as engine:
        pause_of(engine, doze)
        train_step(engine, 0)
        engine.memory_status()
        tickets: Any = engine.core.updates._tickets
        assert tickets
        assert all(ticket.is_done for ticket in tickets.values())


@pytest.mark.unit
def test_a_user_s_own_loop_is_fenced(tmp_path: Path) -> None:
    """The loop uses `zt.shard`, the caller's own `loss.backward()`, and a submodule called by itself."""
    found = []
    for just_in_time in (True, False):
        torch.manual_seed(3)
        model: nn.Module = Chain()
        config = Run(just_in_time=just_in_time, dtype="fp32").config(str(tmp_path))
        model, optimizer = zt.shard(model, config)
        if just_in_time:
            pause_of(optimizer.engine, doze)
        for step in range(4):
            hidden = model.get_submodule("blocks.2")(batch(step)) if step == 2 else batch(step)
            model(hidden).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([weight.detach().clone() for weight in model.parameters()])
        optimizer.engine.close()
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def reads_on_one_rank() -> list[str]:
    """Return, per stage, what a read on rank 0 alone raises right after a step; then that it works after
    `synchronize`."""
    results = []
    for stage in (0, 1, 2, 3):
        with engine_of(Run(stage=stage, persistence=64 if stage == 3 else 0)) as engine:
            train_step(engine, 0)
            weight = engine.module.get_parameter("blocks.1.bias" if stage == 3 else "blocks.1.weight")
            try:
                results.append(str(weight.detach().isfinite().all().item()) if world()[0] == 0 else "")
            except RuntimeError as error:
                results.append(str(error))
            engine.synchronize()
            assert world()[0] != 0 or weight.detach().isfinite().all()
    return results


@pytest.mark.ranks
def test_reads_on_one_rank_say_what_they_need() -> None:
    alone, *others = run_ranks(2, reads_on_one_rank)[0]
    assert alone == "True"
    for results in others:
        assert "engine.synchronize() on every rank" in results


def read_after_evaluation() -> list[bool]:
    """Return, per stage, whether rank 0 alone may read a block that an evaluation in between left out."""
    found = []
    for stage in (1, 2):
        with engine_of(Run(stage=stage)) as engine:
            train_step(engine, 0)
            with torch.no_grad():
                engine(batch(1), leaves_out=3)
            weight = engine.module.get_parameter("blocks.3.weight")
            found.append(world()[0] != 0 or bool(weight.detach().isfinite().all()))
    return found


@pytest.mark.ranks
def test_forward_passes_settle_what_they_left_out() -> None:
    assert run_ranks(2, read_after_evaluation) == [[True, True]] * 2


def different_branches(stage: int) -> list[float]:
    """Leave out different blocks on the ranks, which still publish in one order."""
    with engine_of(Run(stage=stage, dtype="fp32")) as engine:
        for step in range(6):
            train_step(engine, step, leaves_out=world()[0] + 1)
        with zt.full_parameters(engine.module):
            return [float(weight.detach().double().sum()) for weight in engine.module.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_run_different_modules(stage: int) -> None:
    first, second = run_ranks(2, different_branches, stage)
    assert first == second


def leave_a_block_out() -> list[bool]:
    """Return, per stage, whether a late update of a block equals one in time.

    The next forward leaves the block out, and backward writes zeros where that update reads.
    """
    equal = []
    for stage in (0, 1, 2, 3):
        found = []
        for just_in_time in (True, False):
            with engine_of(Run(stage=stage, just_in_time=just_in_time, dtype="fp32")) as engine:
                train_step(engine, 0)
                engine.synchronize()
                if just_in_time:
                    gate = Gate(engine, passes=3)
                    threading.Timer(0.2, gate.open).start()
                train_step(engine, 1)
                train_step(engine, 2, leaves_out=3)
                found.append(engine.module_state_dict())
        equal.append(all(torch.equal(found[0][name], found[1][name]) for name in found[0]))
    return equal


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_unused_blocks_stay_until_they_are_read(world_size: int) -> None:
    assert run_ranks(world_size, leave_a_block_out) == [[True] * 4] * world_size


def facts(**changes: Any) -> dict[str, Any]:
    values = {"tier": "nvme", "stage": 3, "world_size": 2, "on_cuda": False, "is_elementwise": True}
    return {**values, **changes}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("asked", "changes", "expected"),
    [
        (None, {}, True),
        (None, {"stage": 0}, True),
        (None, {"stage": 1}, False),
        (None, {"stage": 2}, False),
        (None, {"stage": 2, "world_size": 1}, True),
        (None, {"tier": "cpu"}, False),
        (None, {"tier": "cpu", "on_cuda": True}, True),
        (None, {"tier": "cpu", "on_cuda": True, "stage": 1}, False),
        (None, {"tier": "none", "on_cuda": True}, False),
        (None, {"is_elementwise": False}, False),
        (True, {"tier": "cpu", "stage": 1}, True),
        (True, {"tier": "none"}, False),
        (False, {}, False),
        (False, {"is_elementwise": False}, False),
    ],
)
def test_when_steps_are_just_in_time(asked: bool | None, changes: dict[str, Any], expected: bool) -> None:
    assert runs_just_in_time(asked, **facts(**changes)) is expected


@pytest.mark.unit
def test_a_rule_on_all_units_cannot_be_just_in_time() -> None:
    with pytest.raises(ConfigError, match="just_in_time"):
        runs_just_in_time(True, **facts(is_elementwise=False))
