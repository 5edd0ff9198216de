"""Memory that a GPU's allocator hands out in a step equals the plan: the formulas and the activations.

Only on a GPU (`make gpu-check`), as memory of the CPU has other users.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.device import DEVICE
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.contract.config import load, resolve
from zerotrain.contract.planner import Tier, Workload, demand, gpt_shape
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.models.gpt import Gpt

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(DEVICE != "cuda", reason="measures a GPU's memory: make gpu-check"),
]

MICRO, VOCABULARY = 4, 256
MODEL = GptSpec(d_model=1024, layers=12, heads=16, context=512)

CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)},
    "fp32": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}},
    "recomputed": {"zero_optimization": {"stage": 3}, "activation_checkpointing": {}},
    "states in host memory": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
    "states and weights in host memory": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    },
}


def config_of(name: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **CASES[name],
    }


def measure(name: str) -> tuple[int, int]:
    """Return (peak of the allocator over the second step, bytes planned), beyond the memory used before."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    recomputes = "activation_checkpointing" in CASES[name]
    model = Gpt(MODEL, vocabulary=VOCABULARY, checkpoint_activations=recomputes)
    engine, *_ = zt.initialize(model=model, config=config_of(name))
    ids = torch.randint(VOCABULARY, (MICRO, MODEL.context + 1), device=engine.device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(ids))
        engine.step()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    engine.close()
    _, world_size = world()
    plan = demand(
        Workload(
            shape=gpt_shape(MODEL, source="test"),
            config=resolve(load(config_of(name)), world_size=world_size),
            ranks_per_worker=1,
            on_host=False,
        )
    ).tier(Tier.GPU)
    assert plan is not None
    return peak, plan.exact_bytes + plan.activation_bytes


def measure_all() -> dict[str, tuple[int, int]]:
    measure("stage 0")  # cuBLAS allocates its work space, which plans count as a library's
    measure("fp32")
    return {name: measure(name) for name in CASES}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_takes_what_was_planned(world_size: int) -> None:
    for rank, found in enumerate(run_ranks(world_size, measure_all)):
        off = {
            name: f"{peak / 2**20:.0f} MiB, planned {planned / 2**20:.0f}"
            for name, (peak, planned) in found.items()
            if not 0.95 * planned <= peak <= 1.02 * planned
        }
        assert not off, f"rank {rank}: {off}"
