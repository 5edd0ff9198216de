"""Features that this version leaves out by decision: their files load and are shown, but cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from tests.support.jobs import make_job
from zerotrain.cli.main import app
from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.contract.config.keys import Status
from zerotrain.contract.config.postponed import postponed_keys
from zerotrain.contract.config.table import KEYS
from zerotrain.operator.api.validation import refusals
from zerotrain.runtime import initialize
from zerotrain.runtime.setup import read_config

pytestmark = pytest.mark.unit


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "Tensor parallelism": ("tensor_parallel.tp_size", {"tensor_parallel": {"tp_size": 8}}),
    "Pipeline parallelism": ("pipeline_parallel.pp_size", {"pipeline_parallel": {"pp_size": 8}}),
    "Expert parallelism": ("expert_parallel", {"expert_parallel": {"enabled": True, "size": 2}}),
    "ZenFlow": ("zero_optimization.zenflow", {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}),
    "SuperOffload": (
        "zero_optimization.offload_optimizer.super_offload",
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
    ),
    "MiCS": (
        "zero_optimization.mics_shard_size",
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True}},
    ),
    "Autotuning": ("autotuning", {"autotuning": {"enabled": True, "fast": False}}),
}


def test_these_features_and_no_others_are_postponed() -> None:
    assert set(postponed_keys()) == set(FILES)
    assert all(key.status is Status.NOT_RUN for key in KEYS if key.postponed)


@pytest.mark.parametrize(("path", "file"), FILES.values(), ids=FILES.keys())
def test_shown_and_refused(path: str, file: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps(file))
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["config", "show", str(source)])
    assert shown.exit_code == 0
    assert any(line.startswith(path) and "not run" in line for line in shown.stdout.splitlines())

    with pytest.raises(ConfigError) as caught:
        initialize(model=nn.Linear(2, 2), config=file)
    found = {item.path: item for item in resolve(load(file), world_size=1).unsupported}
    assert caught.value.path in found
    assert caught.value.way_out == found[caught.value.path].way_out

    refused = {item.path: item.message for item in refusals(make_job({"spec.config": file}).spec)}
    assert found[path].way_out in refused[f"spec.config.{path}"]
    assert found[path].reason in refused[f"spec.config.{path}"]


def test_groups_of_the_caller_take_the_place_of_tensor_parallelism() -> None:
    path, file = FILES["Tensor parallelism"]
    with pytest.raises(ConfigError, match=r"pass initialize\(mpu=\.\.\.\)"):
        read_config(file, world_size=1)
    assert [item.path for item in read_config(file, world_size=1, supplied=("mpu",)).unsupported] == [path]
    with pytest.raises(ConfigError, match="pipeline_parallel"):
        read_config({**file, "pipeline_parallel": {"pp_size": 2}}, world_size=1, supplied=("mpu",))
