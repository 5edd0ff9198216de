"""Frozen weights keep their dtype unless a precision block sets another, at every stage and tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import worlds
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.plan import plan_layout

WIDTH = 128
"""Width at which shards of the matrices are whole pages in every dtype, so that ranks of a host share.
"""
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


class Adapted(nn.Module):
    """A frozen matrix of any dtype with a trainable product beside it, as in LoRA."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        values = torch.randn(WIDTH, WIDTH) / 10
        self.base = nn.Parameter(values.to(base), requires_grad=False)
        self.down = nn.Linear(WIDTH, 16, bias=False, dtype=adapter)
        self.up = nn.Linear(16, WIDTH, bias=False, dtype=adapter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        fixed = nn.functional.linear(hidden, self.base.to(hidden.dtype))
        answer: torch.Tensor = hidden + fixed + self.up(self.down(hidden))
        return answer


class Stack(nn.Module):
    def __init__(self, base: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(base) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()


@dataclass(frozen=True, kw_only=True)
class Setting:
    stage: int
    base: str
    params: str = "none"

    def config(self, spill: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        if self.params != "none":
            zero["offload_param"] = {"device": self.params, "nvme_path": spill, "max_in_cpu": 0}
        optimizer = {"type": "SGD", "params": {"lr": 0.5}}
        return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": optimizer}


SETTINGS = (
    *(Setting(stage=stage, base=base) for stage in (0, 1, 2, 3) for base in ("bfloat16", "float8_e4m3fn")),
    *(Setting(stage=3, base=base) for base in ("float16", "float64", *FLOAT8)),
    *(Setting(stage=3, base="float8_e5m2", params=params) for params in ("cpu", "nvme")),
)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(setting: Setting, spill: str) -> dict[str, Any]:
    base = getattr(torch, setting.base)
    engine, *_ = zt.initialize(model=Stack(base), config=setting.config(spill))
    losses = []
    for step in range(3):
        loss = engine(inputs(step, world()[0]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    memory, status = engine.memory, engine.memory_status()
    whole = engine.module_state_dict()
    found = {
        "losses": losses,
        "dtypes": {name: str(value.dtype) for name, value in engine.module.named_parameters()},
        "bits": all(
            torch.equal(whole[f"blocks.{index}.base"].view(torch.uint8), plain.base.view(torch.uint8))
            for index, plain in enumerate(Stack(base).blocks)
            if isinstance(plain, Adapted)
        ),
        "kept": (
            memory.persistent_bytes + memory.live_bytes(MemoryKind.RING),
            status.planned_persistent_bytes + status.planned_host_bytes,
        ),
        "on disk": (memory.live_bytes(MemoryKind.SPILL), status.planned_disk_bytes),
        "peak": memory.peak_bytes() <= status.planned_peak_bytes + status.planned_host_bytes
        or setting.base == "float64",
    }
    engine.close()
    return found


def train_all(spill: str) -> list[dict[str, Any]]:
    return [trained(setting, spill) for setting in SETTINGS]


def plain_losses(base: torch.dtype, world_size: int) -> list[list[float]]:
    model = Stack(base)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        losses = [model(inputs(step, rank)) for rank in range(world_size)]
        (sum(losses, torch.zeros(())) / world_size).backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "each_transport"), worlds(1, 2), indirect=["each_transport"])
@pytest.mark.usefixtures("each_transport")
def test_frozen_weights_keep_dtype_bits_and_bytes(world_size: int, tmp_path: Path) -> None:
    for rank, per_rank in enumerate(run_ranks(world_size, train_all, str(tmp_path))):
        for setting, found in zip(SETTINGS, per_rank, strict=True):
            expected = plain_losses(getattr(torch, setting.base), world_size)
            assert found["losses"] == pytest.approx([row[rank] for row in expected], abs=1e-6), setting
            for name, dtype in found["dtypes"].items():
                assert dtype == f"torch.{setting.base if name.endswith('base') else 'float32'}", setting
            assert found["bits"], setting
            for what in ("kept", "on disk"):
                counted, planned = found[what]
                assert counted == planned, (setting, what)
            assert found["peak"], setting


def dtypes_of(model: nn.Module, compute_dtype: str) -> dict[str, str]:
    layout = plan_layout(model, world_size=2, compute_dtype=compute_dtype)
    return {segment.fqn: unit.dtype for unit in layout.units for segment in unit.segments}


@pytest.mark.unit
def test_a_precision_block_and_trained_neighbours_of_the_same_dtype_convert_them() -> None:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert dtypes_of(Adapted(bf16), "fp32")["base"] == "bf16"
    assert dtypes_of(Adapted(bf16), "bf16")["base"] == "bf16"
    assert dtypes_of(Adapted(fp32), "bf16")["base"] == "bf16"
    assert dtypes_of(Adapted(torch.float8_e5m2), "fp16")["base"] == "fp16"
    # All have one dtype: trained weights become fp32, and a layer must meet its own dtype.
    assert set(dtypes_of(Adapted(bf16, adapter=bf16), "fp32").values()) == {"fp32"}
    assert dtypes_of(Adapted(fp16, adapter=bf16), "fp32") == {
        "base": "fp16", "down.weight": "fp32", "up.weight": "fp32"
    }  # fmt: skip
    assert set(dtypes_of(Adapted(bf16, adapter=bf16).requires_grad_(False), "fp32").values()) == {"bf16"}
