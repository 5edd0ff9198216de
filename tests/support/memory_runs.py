"""Training of a small GPT for two steps, and the engine's own memory counters; run on every rank."""

from __future__ import annotations

import os
from typing import Any

import torch

import zerotrain.runtime as zt
from zerotrain.contract.memory import (
    disk_bytes,
    gpt_units,
    gpu_persistent,
    gpu_transient,
    host_bytes,
    memory_inputs,
    small_parameters,
    step_traffic,
)
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.models.gpt import Gpt
from zerotrain.runtime.zero.ledger import MemoryKind

SHAPE = {"d_model": 128, "layers": 3, "context": 16}


def measured_and_planned(configs: list[dict[str, Any]]) -> list[dict[str, tuple[int, int]]]:
    """Return, per configuration, (measured, planned) bytes kept between steps and at the peak of a step."""
    return [_one(config) for config in configs]


def _one(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    model = Gpt(GptSpec(heads=4, **SHAPE))
    engine, _, _, _ = zt.initialize(model=model, config=config)
    ids = torch.randint(0, 256, (1, SHAPE["context"] + 1))
    # The first step records the order of units; prefetching begins with the second.
    for _ in range(2):
        engine.memory.reset_peak()
        engine.backward(engine(ids))
        engine.step()
    units = gpt_units(world_size=engine.world_size, small=small_parameters(engine.config), **SHAPE)
    inputs = memory_inputs(engine.config, units, shares_memory=engine.comm.shares_memory)
    planned = gpu_persistent(inputs).total_bytes
    found = {
        "kept": (engine.memory.persistent_bytes, planned),
        "peak": (engine.memory.peak_bytes(), planned + gpu_transient(inputs).peak_bytes),
    }
    engine.close()
    return found


def offloaded_bytes(configs: list[dict[str, Any]], folder: str) -> list[dict[str, tuple[int, int]]]:
    """Return, per configuration and kind of buffer, (counted, planned) bytes after two steps.

    The bytes moved in a step are among them.
    """
    os.environ["ZEROTRAIN_NVME_PATH"] = folder
    return [_offloaded(config) for config in configs]


def _offloaded(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    engine, _, _, _ = zt.initialize(model=Gpt(GptSpec(heads=4, **SHAPE)), config=config)
    ids = torch.randint(0, 256, (1, SHAPE["context"] + 1))
    moved = []
    for _ in range(3):
        engine.backward(engine(ids))
        engine.step()
        engine.synchronize()
        moved.append(engine.core.options.spill_store.memory.moved if engine.core.options.spill_store else 0)
    units = gpt_units(
        world_size=engine.world_size, small=small_parameters(engine.config, on_host=True), **SHAPE
    )
    spill = config["zero_optimization"].get("spill", {})
    inputs = memory_inputs(
        engine.config,
        units,
        shares_memory=engine.comm.shares_memory,
        on_host=True,
        is_encrypted=spill.get("encryption") != "None",
    )
    gpu, host = gpu_persistent(inputs), host_bytes(inputs)
    planned = {
        MemoryKind.PARAMS: gpu.param_bytes + gpu.replicated_bytes,
        MemoryKind.GRADS: gpu.grad_bytes,
        MemoryKind.STATES: gpu.optimizer_bytes,
        MemoryKind.HOST_STATES: host.optimizer_bytes,
        MemoryKind.HOST_GRADS: host.grad_bytes,
        MemoryKind.HOST_PARAMS: host.param_bytes,
        MemoryKind.RING: host.ring_bytes,
        MemoryKind.TAGS: host.tag_bytes,
        MemoryKind.SPILL: disk_bytes(inputs),
    }
    found = {str(kind): (engine.memory.live_bytes(kind), size) for kind, size in planned.items()}
    # A weight that is still in a buffer is not read again, so parameters may move less.
    kind = "step traffic" if inputs.param_tier != "nvme" else "step traffic at most"
    found[kind] = (moved[2] - moved[1], step_traffic(inputs).nvme_bytes)
    engine.close()
    return found
