"""Updates beside a GPU run on the stream of copies, which must have seen what the computation made for them.

The engine updates on the CPU, on streams that are not there (`fake_streams.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.fake_streams import MAIN, SIDE, FakeCuda
from zerotrain.runtime.comm.streams import ComputeStream
from zerotrain.runtime.offload.transfer import DeviceLink
from zerotrain.runtime.optim.muon import MuonKernel, MuonRule, PreparedMuon
from zerotrain.runtime.optim.update import StepUpdate, UnitUpdate

pytestmark = pytest.mark.unit

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "just_in_time": False}},
    "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
}


def train_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def test_updates_wait_for_matrices_made_orthogonal(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = zt.initialize(model=nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), config=CONFIG)[0]
    cuda, prepare, update = FakeCuda(), MuonRule.prepare, StepUpdate.run

    def prepared(*args: Any, **kwargs: Any) -> Any:
        rule = prepare(*args, **kwargs)
        cuda.note("prepared", "")
        return rule

    def updated(step: StepUpdate, name: str) -> None:
        cuda.note("updated", name)
        update(step, name)

    with monkeypatch.context() as patch:
        cuda.install(patch)
        patch.setattr(MuonRule, "prepare", prepared)
        patch.setattr(StepUpdate, "run", updated)
        executor = engine.pipeline.executor
        patch.setattr(executor, "_link", DeviceLink(engine.device, engine.memory, pins=False))
        train_step(engine)
    engine.close()
    (made,), updates = cuda.found("prepared"), cuda.found("updated")
    assert made.stream == MAIN
    assert len(updates) == 2
    for note in updates:
        assert note.stream == SIDE
        assert note.seen[MAIN] >= made.place, f"{note.label} was updated before its matrix was there"


def test_the_allocator_knows_which_stream_reads_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of a unit whose states stay on the GPU is freed while the stream of copies may read it."""
    recorded: list[tuple[int, str]] = []
    monkeypatch.setattr(ComputeStream, "current", lambda _device: ComputeStream("copies"))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.data_ptr(), stream))
    )
    engine = zt.initialize(model=nn.Linear(32, 48), config=CONFIG)[0]
    directions: list[int] = []
    kernel = PreparedMuon.kernel

    def seen(rule: PreparedMuon, unit: UnitUpdate) -> Any:
        directions.extend(part.direction.data_ptr() for part in rule.parts[unit.name])
        made = kernel(rule, unit)
        assert isinstance(made, MuonKernel)
        return made

    monkeypatch.setattr(PreparedMuon, "kernel", seen)
    train_step(engine)
    engine.close()
    assert recorded == [(address, "copies") for address in directions]
    assert len(directions) == 1
