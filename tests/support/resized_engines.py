"""One rank of engines that load checkpoints of other stages and numbers of ranks; run by `run_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import zerotrain.runtime as zt
from tests.support.uneven_model import UnevenModel
from zerotrain.runtime.engine import Engine

OPTIMIZERS = ("AdamW", "SGD", "Lion", "Adagrad", "Lamb", "Muon", "OneBitAdam")
STAGES = (0, 1, 2, 3)

VOCABULARY, WIDTH = 257, 33
"""Sizes at which three ranks own parts of the embedding."""


def make(optimizer: str, stage: int, *, seed: int = 1) -> Engine:
    """Return an engine on the ranks of the default group."""
    torch.manual_seed(seed)
    params: dict[str, object] = {"lr": 1e-2}
    if optimizer == "SGD":
        params["momentum"] = 0.9
    if optimizer == "OneBitAdam":
        params["freeze_step"] = 2
    config = {
        "train_batch_size": 6,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50},
        "optimizer": {"type": optimizer, "params": params},
    }
    return zt.initialize(model=UnevenModel(VOCABULARY, WIDTH), config=config)[0]


def train(engine: Engine, steps: int) -> None:
    """Train on the same global batches at every number of ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for _ in range(steps):
        generator = torch.Generator().manual_seed(engine.global_steps)
        ids = torch.randint(VOCABULARY, (6, 9), generator=generator).chunk(world)[rank]
        engine.backward(engine(ids))
        engine.step()


def save_all(folder: str, cases: Sequence[tuple[str, int]]) -> None:
    """Train each (optimizer, stage) and save it to `<folder>/<optimizer>-<stage>`."""
    for optimizer, stage in cases:
        engine = make(optimizer, stage)
        train(engine, 4)
        engine.save_checkpoint(Path(folder) / f"{optimizer}-{stage}", "x")


def load_and_save_all(cases: Sequence[tuple[str, int, str, str]]) -> None:
    """Load each (optimizer, stage, source, target) into an engine with other weights and save it again."""
    for optimizer, stage, source, target in cases:
        engine = make(optimizer, stage, seed=2)
        path, _ = engine.load_checkpoint(source, "x")
        assert path is not None
        assert engine.global_steps == 4
        engine.save_checkpoint(target, "x")
        if stage == 3:  # the loaded engine can train
            train(engine, 1)
