"""Small costs of ADR 0076 on one GPU, each beside the way it was: inputs in host memory, joined units, saves.

    python3 -m tests.gpu.small_costs

Both ways are in one process, as rank 0 of a world of 8 whose other ranks do not exist
(`tests.gpu.fake_world`), and run one after the other; a row of JSON has the median of their ratios. Without a
GPU the same code runs on small sizes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn

from tests.gpu.fake_world import CONTEXT, DEVICE, LAYERS, MICRO, ON_GPU, ROUNDS, WIDTH, join, wait

CONVOLUTIONS, CHANNELS, SIDE = (50, 64, 32) if ON_GPU else (4, 16, 4)
SAVED_NUMEL = 1 << (28 if ON_GPU else 18)


def main() -> None:
    join(8)
    show("moved inputs / kept on the GPU", **moved_inputs())
    show("joined units / one for each layer", **joined_units())
    show("save through locked windows / pageable ones", **saves())


def show(what: str, new: Callable[[], object], old: Callable[[], object], **facts: Any) -> None:
    """Run both in turn and print the row."""
    ratios, times = [], []
    for round_number in range(ROUNDS + 1):
        first, second = timed(new), timed(old)
        if round_number:  # the first one fills caches
            ratios.append(first / second)
            times.append(first)
    row: Mapping[str, Any] = {
        "row": what,
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "ms": round(1e3 * statistics.median(times), 2),
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        **facts,
    }
    print(json.dumps(row), flush=True)


def timed(step: Callable[[], object]) -> float:
    wait()
    began = perf_counter()
    step()
    wait()
    return perf_counter() - began


def moved_inputs() -> dict[str, Any]:
    """Return a step with checkpointed inputs in host memory, and one with inputs on the GPU."""
    import zerotrain.runtime as zt
    from zerotrain.contract.train_spec import GptSpec
    from zerotrain.runtime.models.gpt import Gpt

    spec = GptSpec(d_model=WIDTH, layers=LAYERS, heads=WIDTH // 64, context=CONTEXT)
    with DEVICE:
        model = Gpt(spec, checkpoint_activations=True)
    engine = zt.initialize(model=model, config=config(3))[0]
    batch = torch.randint(0, 256, (MICRO, CONTEXT + 1), device=DEVICE)

    def step(in_host_memory: bool) -> None:
        zt.configure_checkpointing(checkpoint_in_cpu=in_host_memory)
        engine.backward(engine(batch))
        engine.step()

    return {"new": lambda: step(True), "old": lambda: step(False)}


def joined_units() -> dict[str, Any]:
    """Return a step of small convolutions as the device's default has it, and one with a unit for each."""
    import zerotrain.runtime as zt

    def step_of(engine: Any) -> Callable[[], None]:
        images = torch.ones(MICRO, CHANNELS, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)

        def step() -> None:
            engine.backward(engine(images).float().square().mean())
            engine.step()

        return step

    steps, counts = [], []
    for zero in ({}, {"module_granularity_threshold": 1024}):
        layers = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(CONVOLUTIONS))
        with DEVICE:
            model = nn.Sequential(*layers)
        engine = zt.initialize(model=model, config=config(1, **zero))[0]
        steps.append(step_of(engine))
        counts.append(len(engine.checkpoint_state().layout.units))
    return {"new": steps[0], "old": steps[1], "units": counts}


def saves() -> dict[str, Any]:
    """Return the copy that a background save makes of a GPU's state, and one without page-locked memory."""
    from zerotrain.runtime.checkpoint import Staging
    from zerotrain.runtime.zero.state import TensorStream, windows

    state = torch.ones(SAVED_NUMEL, device=DEVICE)
    staging, plain = Staging(), torch.zeros(SAVED_NUMEL)

    def pageable() -> None:
        for start, stop in windows(SAVED_NUMEL):
            plain[start:stop].copy_(state[start:stop])

    return {
        "new": lambda: staging.copies({"state": TensorStream(state)}),
        "old": pageable,
        "MiB": state.nbytes >> 20,
    }


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }


if __name__ == "__main__":
    main()
