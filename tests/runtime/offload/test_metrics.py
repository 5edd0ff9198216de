"""Reports of a rank that spills: metrics, log, memory status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import TrainerRun, config, job
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.train.measuring import measure
from zerotrain.runtime.train.report import Reporter, StepReport
from zerotrain.runtime.zero.sharded_model import has_lost_spill

pytestmark = pytest.mark.ranks


NUMEL = 4 * 2048
"""Elements of the model below: a multiple of the padding of shards."""


def reported(folder: str, encryption: str) -> dict[str, float | None]:
    """Return metrics after two steps of a model whose states are spilled."""
    block = {
        "stage": 2,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "spill": {"encryption": encryption},
    }
    file = {"train_batch_size": 1, "bf16": {"enabled": True, "auto_cast": True}, "zero_optimization": block}
    engine, *_ = zt.initialize(model=nn.Linear(128, 64, bias=False), config=file)
    assert engine.spill_info is not None
    launch = LaunchSpec(
        job="gpt", job_uid="u", attempt=1, master_addr="x", world_size=1, node_rank=0, config_path=Path("c")
    )
    reporter = Reporter.start(
        launch, RankEnv(rank=0, local_rank=0, local_world_size=1), RankChannel(None, rank=0)
    )
    born = everything(reporter)
    reporter.ready(engine)
    for _ in range(2):
        loss = engine(torch.ones(1, 128)).float().mean()
        engine.backward(loss)
        result = engine.step()
        engine.synchronize()
        report = StepReport(result=result, loss=1.0, seconds=1.0, data_seconds=0.0, tokens=1, samples=1)
        reporter.step(report, engine=engine)
    status = engine.memory_status()
    assert status.tier_bytes["disk"] == status.planned_disk_bytes == 10 * NUMEL
    assert "offloaded, by formula" in str(status)
    assert "spill: read" in str(status)
    measure(reporter.metrics, engine)
    found = everything(reporter)
    engine.close()
    return {**{f"born {name}": value for name, value in born.items()}, **found}


def everything(reporter: Reporter) -> dict[str, float | None]:
    common = {"job_name": "gpt", "rank": "0"}
    read = reporter.metrics.registry.get_sample_value
    names = ("spill_wait", "optimizer_exposed", "optimizer_background")
    found = {name: read(f"zerotrain_{name}_seconds_total", common) for name in names}
    for direction in ("h2d", "d2h", "spill_read", "spill_write"):
        found[direction] = read("zerotrain_transfer_bytes_total", {**common, "direction": direction})
    found["nvme"] = read("zerotrain_memory_peak_bytes", {**common, "tier": "nvme", "phase": "step"})
    found["plain"] = sum(
        sample.value
        for family in reporter.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "zerotrain_spill_info" and sample.labels.get("encryption") == "None"
    )
    found["spills"] = sum(
        sample.value
        for family in reporter.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "zerotrain_spill_info"
    )
    return found


@pytest.mark.parametrize("encryption", ["AEAD", "None"])
def test_what_a_spill_exports(encryption: str, tmp_path: Path) -> None:
    (found,) = run_ranks(1, reported, str(tmp_path), encryption)
    assert {name: value for name, value in found.items() if name.startswith("born") and value} == {}
    assert (found["h2d"], found["d2h"]) == (0, 0), "the CPU computes"
    assert found["spill_read"] == 2 * 10 * NUMEL
    assert found["spill_write"] == 3 * 10 * NUMEL, "once when it was filled, once per step"
    assert found["nvme"] == 10 * NUMEL
    assert (found["optimizer_exposed"] or 0) + (found["optimizer_background"] or 0) > 0
    assert found["spills"] == 1
    assert found["plain"] == (encryption == "None")


@pytest.mark.parametrize(
    "block",
    [
        {"stage": 3, "offload_param": {"device": "nvme"}},
        {"stage": 2, "offload_optimizer": {"device": "nvme", "ratio": 0.0}},
    ],
)
def test_a_drive_that_nothing_goes_to(block: dict[str, Any], tmp_path: Path) -> None:
    """All weights are below `max_in_cpu`; no unit is chosen by `ratio`."""
    for name in ("offload_param", "offload_optimizer"):
        if name in block:
            block = {**block, name: {**block[name], "nvme_path": str(tmp_path)}}
    model, config = nn.Linear(128, 64), {"train_batch_size": 1, "zero_optimization": block}
    engine, *_ = zt.initialize(model=model, config=config)
    assert engine.spill_info is None
    assert engine.memory_status().tier_bytes["disk"] == 0
    assert engine.offload_totals().spill_written_bytes == 0
    with pytest.raises(RuntimeError):
        engine.backward(torch.zeros((), requires_grad=False))
    assert not has_lost_spill(engine.core)
    engine.core.check_idle("the next step")
    engine.close()


def test_the_trainer_logs_how_it_spills(tmp_path: Path) -> None:
    block: dict[str, Any] = {"stage": 1, "offload_optimizer": {"device": "nvme"}}
    run = TrainerRun(
        tmp_path / "run",
        job(steps=2, checkpoint={}),
        config(zero_optimization=block),
        env={"ZEROTRAIN_NVME_PATH": str(tmp_path), "ZEROTRAIN_NVME_BYTES": str(2**30)},
    )
    log = run.start().finish()
    line = next(line for line in log.splitlines() if line.startswith("spill: "))
    assert "AES-256-GCM" in line
    assert str(tmp_path) in line
    assert list(tmp_path.glob("zerotrain-*")) == [], "no name is left"
