"""One rank of the real engine in the tests of checkpoints; run by `tests.support.ranks.run_ranks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.factory_models import build
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.initialization import initialize

GLOBAL_BATCH = 8


def make_engine(*, stage: int = 3, accumulation: int = 1, world_size: int) -> Engine:
    """Return an engine with a tiny model without dropout on the ranks of the default group."""
    torch.manual_seed(5)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    return initialize(model=build(dropout=0.0), config=config)[0]


def train(engine: Engine, steps: int) -> None:
    """Train for some optimizer steps on fixed data."""
    generator = torch.Generator().manual_seed(engine.global_steps)
    for _ in range(steps):
        for _ in range(engine.config.batch.gradient_accumulation_steps):
            ids = torch.randint(256, (engine.config.batch.micro_batch_size, 9), generator=generator)
            engine.backward(engine(ids))
            engine.step()


def train_and_save(world_size: int, folder: str, steps: int) -> None:
    engine = make_engine(world_size=world_size)
    train(engine, steps)
    engine.save_checkpoint(folder, client_state={"note": "from training"})


def load_and_save(world_size: int, source: str, target: str, stage: int) -> int:
    """Load at this number of ranks and stage, save again at once, and return the step."""
    engine = make_engine(world_size=world_size, stage=stage)
    path, client_state = engine.load_checkpoint(source)
    if path is None or client_state != {"note": "from training"}:
        raise AssertionError(f"loaded {path} with {client_state}")
    engine.save_checkpoint(target, client_state=client_state)
    return engine.global_steps


def refusals_inside_accumulation(world_size: int, folder: str) -> list[str]:
    """Try to save and load after the first of two micro-batches; return the texts of the errors.

    The folder must not exist afterwards.
    """
    engine = make_engine(world_size=world_size, accumulation=2)
    ids = torch.zeros(engine.config.batch.micro_batch_size, 9, dtype=torch.int64)
    engine.backward(engine(ids))
    engine.step()
    texts: list[str] = []
    actions: tuple[Any, ...] = (engine.save_checkpoint, engine.load_checkpoint)
    for action in actions:
        try:
            action(folder)
        except RuntimeError as error:
            texts.append(str(error))
    if Path(folder).exists():
        raise AssertionError("the refused save wrote something")
    engine.backward(engine(ids))
    engine.step()
    engine.save_checkpoint(folder)
    return texts
