"""Engines whose updates may run in the background, for the tests of the just-in-time step."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.training import world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.state import whole

WIDTH, SAMPLES = 32, 4
PATIENCE_S = 180.0
"""Timeout of a wait for another thread; reaching it fails the test."""


class Chain(nn.Module):
    """Blocks in a row.

    `forward` may leave out the middle one, and the last weight may be tied to the first.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if tied:
            self.blocks[3].weight = self.blocks[0].weight

    def forward(self, hidden: torch.Tensor, *, leaves_out: int | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != leaves_out:
                hidden = hidden + torch.tanh(block(hidden))
        return hidden.float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a `Chain`."""

    just_in_time: bool | None = True
    stage: int = 0
    tier: str = "cpu"
    dtype: str = "bf16"
    steps: int = 20
    accumulation: int = 1
    clip: float = 0.05
    tied: bool = False
    persistence: int = 0
    """Size in elements below which parameters stay whole at stage 3."""

    def config(self, folder: str) -> dict[str, Any]:
        offload = {"device": self.tier, "nvme_path": folder, "just_in_time": self.just_in_time}
        fp16 = {
            "enabled": True,
            "auto_cast": True,
            "initial_scale_power": 32,
            "hysteresis": 1,
            "loss_scale_window": 4,
        }
        return {
            "train_batch_size": SAMPLES * self.accumulation,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.dtype == "bf16", "auto_cast": True},
            **({"fp16": fp16} if self.dtype == "fp16" else {}),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": self.persistence,
                "offload_optimizer": offload,
            },
        }


@contextmanager
def engine_of(run: Run) -> Iterator[Engine]:
    """Provide an engine on this rank and close it at the end."""
    torch.manual_seed(3)
    model = Chain(tied=run.tied)
    with tempfile.TemporaryDirectory() as folder:
        engine, *_ = zt.initialize(model=model, config=run.config(folder), unit_modules=[nn.Linear])
        try:
            yield engine
        finally:
            engine.close()


def batch(step: int) -> torch.Tensor:
    """Return this rank's part of a global batch."""
    rank, ranks = world()
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator).chunk(ranks)[rank]


def train_step(engine: Engine, step: int, **kwargs: Any) -> float:
    """Train on all micro-batches of one step and return the last loss."""
    loss = torch.zeros(())
    for index in range(engine.gradient_accumulation_steps()):
        loss = engine(batch(100 * step + index), **kwargs)
        engine.backward(loss)
        engine.step()
    return loss.item()


def contents(engine: Engine) -> dict[str, bytes]:
    """Return weights and all streams of this rank's checkpoint, as bytes."""
    state = engine.checkpoint_state()
    found = {"/".join(key): whole(stream).cpu().numpy().tobytes() for key, stream in state.streams.items()}
    with zt.full_parameters(engine.module):
        for name, value in engine.module.named_parameters():
            found[name] = value.detach().float().cpu().numpy().tobytes()
    return {**found, "scalars": repr(state.scalars["optimizer"]).encode()}


def pause_of(engine: Engine, pause: Callable[[], None]) -> None:
    """Call `pause` in the background before each unit's update."""
    updater = engine.pipeline.executor.updater
    assert updater is not None
    updater.pause = pause


def slow_down(engine: Engine, *, seconds: float) -> None:
    """Insert random pauses before updates and before blocks, different ones on every rank."""
    chance = random.Random(os.getpid())

    def wait(*_: object) -> None:
        time.sleep(chance.random() * seconds)

    if engine.pipeline.executor.updater is not None:
        pause_of(engine, wait)
    for module in engine.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(wait)
