"""An update that starts before the host knows the norm changes what an update after it changes.

The kernels' host build stands in for a GPU's, so the steps are a GPU's, on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.host_kernels import pretend_gpu
from zerotrain.runtime import step as step_module
from zerotrain.runtime.comm.mismatch import CommError
from zerotrain.runtime.comm.streams import HostCopy
from zerotrain.runtime.comm.sums import sums_of_squares
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.state import whole

pytestmark = pytest.mark.unit

STEPS = 9
ONE_CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
    "bf16, checked": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    "bf16": {"bf16": {"enabled": True}},
}


def make_engine(precision: str, *, stage: int = 1, clip: float = 0.5, own_schedule: bool = False) -> Engine:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **PRECISIONS[precision],
    }
    if own_schedule:
        falling = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
        return zt.initialize(model=model, config=config, lr_scheduler=falling)[0]
    config["scheduler"] = {"type": "OneCycle", "params": ONE_CYCLE}
    return zt.initialize(model=model, config=config)[0]


def train_step(engine: Engine, step: int, *, overflows: bool = False) -> StepResult:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(4, 8, generator=generator)
    loss = engine(inputs.to(next(engine.module.parameters()).dtype)).float().square().mean()
    engine.backward(loss * float("inf") if overflows else loss)
    return engine.step()


def seen_after(engine: Engine, result: StepResult) -> tuple[Any, ...]:
    """Return what a script can see of a step; the norm of an overflow has no meaning."""
    group = engine.optimizer.param_groups[0]
    return (
        *(result.skipped, result.lr, result.loss_scale, result.skipped or result.grad_norm),
        *(engine.skipped_steps, engine.optimizer.num_updates, engine.schedule.num_updates),
        *(group["lr"], *group["betas"], engine.pipeline.scaler.scale),
    )


def trained(precision: str, *, looks: bool, **options: Any) -> tuple[list[Any], dict[Any, bytes], str]:
    """Train with an overflow at every third step; return what is seen, after each step or in the end, and the
    state."""
    engine = make_engine(precision, **options)
    results, seen = [], []
    for step in range(STEPS):
        results.append(train_step(engine, step, overflows=step % 3 == 2))
        if looks:
            seen.append(seen_after(engine, results[-1]))
    if not looks:
        seen = [(result.skipped, result.lr, result.loss_scale) for result in results]
    state = engine.checkpoint_state()
    streams = {key: whole(stream).numpy().tobytes() for key, stream in state.streams.items()}
    engine.close()
    return seen, streams, repr(state.scalars)


CASES = [
    *product(["fp32", "fp16", "bf16, checked"], [{"clip": 0.0}, {"clip": 0.5}], [False, True]),
    ("bf16, checked", {"own_schedule": True}, False),
]


@pytest.mark.parametrize(("precision", "options", "looks"), CASES)
def test_skipped_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, precision: str, options: dict[str, Any], looks: bool
) -> None:
    wanted, *state = trained(precision, looks=looks, **options)
    kernels = pretend_gpu(monkeypatch)
    found, *found_state = trained(precision, looks=looks, **options)
    assert kernels.launches > 0
    assert [seen[0] for seen in found] == [False, False, True] * (STEPS // 3)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)  # the squares are added in another order
    assert found_state == state


def test_a_rate_that_a_script_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    engine = make_engine("fp32")
    train_step(engine, 0, overflows=True)
    engine.optimizer.param_groups[0]["lr"] = 0.125
    assert train_step(engine, 1).lr == 0.125
    assert engine.schedule.num_updates == 1
    engine.close()


class HostReads:
    """Values that the host takes from the device, by the step whose work it waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = 0
        self.notes: list[str] = []
        made: dict[HostCopy, int] = {}
        init, read = HostCopy.__init__, HostCopy.read

        def note_made(copy: HostCopy, tensor: torch.Tensor) -> None:
            init(copy, tensor)
            made[copy] = self.step

        def note_read(copy: HostCopy) -> torch.Tensor:
            self.notes.append("this step" if made[copy] == self.step else "an earlier step")
            return read(copy)

        def note_sums(flats: Any) -> list[float]:
            self.notes.append("this step")
            return sums_of_squares(flats)

        monkeypatch.setattr(HostCopy, "__init__", note_made)
        monkeypatch.setattr(HostCopy, "read", note_read)
        monkeypatch.setattr(step_module, "sums_of_squares", note_sums)

    def during(self, step: Callable[[], object]) -> list[str]:
        self.step += 1
        self.notes.clear()
        step()
        return list(self.notes)


def note_updates(kernels: Any, notes: list[str]) -> Any:
    """Return the kernels, whose updates are noted."""

    class Noting:
        def __getattr__(self, name: str) -> Any:
            if name == "update":
                notes.append("update")
            return getattr(kernels, name)

    return Noting()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_host_waits_for_no_step(monkeypatch: pytest.MonkeyPatch, precision: str, stage: int) -> None:
    pretend_gpu(monkeypatch)
    engine = make_engine(precision, stage=stage)
    reads = HostReads(monkeypatch)
    assert reads.during(lambda: train_step(engine, 0)) == []
    assert reads.during(lambda: train_step(engine, 1)) == ["an earlier step"]
    assert engine.last_step is not None
    assert engine.last_step.grad_norm > 0.0
    assert not engine.last_step.skipped
    assert reads.notes == ["an earlier step", "this step"]
    engine.close()


def test_fp16_waits_when_the_next_forward_pass_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    engine = make_engine("fp16")
    reads, losses = HostReads(monkeypatch), list[torch.Tensor]()

    def forward() -> None:
        losses.append(engine(torch.ones(4, 8, dtype=torch.float16)).float().square().mean())

    reads.during(lambda: train_step(engine, 0))
    assert reads.during(forward) == []
    assert reads.during(lambda: engine.backward(losses[0])) == ["an earlier step"]
    assert reads.during(engine.step) == []
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_others_do_not_wait_for_a_step_before_the_next(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    pretend_gpu(monkeypatch)
    engine = make_engine(precision)
    reads, dtype = HostReads(monkeypatch), next(engine.module.parameters()).dtype
    reads.during(lambda: train_step(engine, 0))
    loss = engine(torch.ones(4, 8, dtype=dtype)).float().square().mean()
    assert reads.during(lambda: engine.backward(loss)) == []
    assert reads.during(engine.step) == ["an earlier step"]
    engine.close()


def test_a_schedule_that_cannot_go_back_waits_behind_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = HostReads(monkeypatch)
    pretend_gpu(monkeypatch, note_updates(pretend_gpu(monkeypatch), reads.notes))
    engine = make_engine("fp32", own_schedule=True)
    found = reads.during(lambda: train_step(engine, 0))
    assert found == ["update"] * (len(found) - 1) + ["this step"]
    assert len(found) > 1
    engine.close()


def test_no_checkpoint_has_a_step_that_nobody_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpu(monkeypatch)
    engine = make_engine("bf16")
    train_step(engine, 0)

    def diverged(copy: HostCopy) -> torch.Tensor:
        raise CommError("ranks diverged")

    with monkeypatch.context() as within:
        within.setattr(HostCopy, "read", diverged)
        with pytest.raises(CommError, match="ranks diverged"):
            engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.close()


def test_a_late_value_is_read_once() -> None:
    norms = iter([2.5])
    result = StepResult(step=1, at_boundary=True, grad_norm=lambda: next(norms))
    assert (result.grad_norm, result.grad_norm) == (2.5, 2.5)
    assert StepResult(step=1, at_boundary=False).grad_norm == 0.0
