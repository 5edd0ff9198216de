"""The formulas against the engine where states and parameters are offloaded: every counter, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_runs import offloaded_bytes
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def config(
    stage: int, states: dict[str, Any] | None, params: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 1_000,
        **more.pop("zero", {}),
    }
    if states is not None:
        zero["offload_optimizer"] = states
    if params is not None:
        zero["offload_param"] = params
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        **more,
        "zero_optimization": zero,
    }


CPU = {"device": "cpu"}
NVME = {"device": "nvme"}
SPILLED = {"device": "nvme", "max_in_cpu": 0}
SOME = {"device": "nvme", "max_in_cpu": 120_000}

CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}, cpu": config(stage, CPU) for stage in range(4)},
    **{f"stage {stage}, nvme": config(stage, NVME) for stage in range(4)},
    "a part": config(2, {**NVME, "ratio": 0.4}),
    "a part in host memory": config(1, {**CPU, "ratio": 0.7}),
    "nothing": config(1, {**CPU, "ratio": 0.0}),
    "whole masters": config(1, NVME, bf16={"enabled": True, "store_param_remainders": False}),
    "remainders on the device": config(2, None, bf16={"enabled": True, "store_param_remainders": True}),
    "fp32": config(2, NVME, bf16={"enabled": False}),
    "Lion": config(3, NVME, optimizer={"type": "Lion"}),
    "SGD": config(1, CPU, optimizer={"type": "SGD"}),
    "plain": config(3, NVME, zero={"spill": {"encryption": "None"}}),
    "parameters in host memory": config(3, CPU, CPU),
    "parameters on disk": config(3, NVME, SPILLED),
    "some of them": config(3, CPU, SOME),
    "parameters alone": config(3, None, SPILLED),
    **{
        f"fp32, parameters {name}": config(3, states, {"device": "nvme", **params}, bf16={"enabled": False})
        for name, states, params in (
            ("on disk", NVME, {"max_in_cpu": 0}),
            ("in part", CPU, {"max_in_cpu": 120_000}),
            ("in part, states, too", {**NVME, "ratio": 0.6}, {"max_in_cpu": 120_000}),
            ("as DeepSpeed's", NVME, {}),
            ("alone", None, {"max_in_cpu": 0}),
        )
    },
    "plain, parameters": config(3, None, SPILLED, zero={"spill": {"encryption": "None"}}),
    "nothing to keep": config(
        1, NVME, bf16={"enabled": False}, optimizer={"type": "SGD", "params": {"momentum": 0.0}}
    ),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_of_every_tier(world_size: int, tmp_path: Path) -> None:
    for found in run_ranks(world_size, offloaded_bytes, list(CASES.values()), str(tmp_path)):
        for name, measured in zip(CASES, found, strict=True):
            counted, most = measured.pop("step traffic at most", (0, 0))
            assert most // 2 <= counted <= most, name
            wrong = {kind: pair for kind, pair in measured.items() if pair[0] != pair[1]}
            assert not wrong, name
