"""One rank of engines that save in the background; run by `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from tests.support.checkpoint_engines import make_engine, train
from zerotrain.contract.memory import UnitSize, memory_inputs, snapshot_bytes
from zerotrain.runtime.checkpoint import CheckpointError, Owner, tensorfile
from zerotrain.runtime.checkpoint.fence import take_over
from zerotrain.runtime.checkpoint.rawfile import WrittenFile
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.ledger import MemoryKind


class Gate:
    """Holds the threads that write tensor files until `open`; then they write, or fail with `error`."""

    def __init__(self, error: OSError | None = None) -> None:
        self._event = threading.Event()
        self._real = tensorfile.write_tensors
        self._error = error
        tensorfile.write_tensors = self._write  # type: ignore[assignment]

    def _write(self, *args: Any) -> WrittenFile:
        if threading.current_thread() is not threading.main_thread():
            self._event.wait(180)
            if self._error is not None:
                raise self._error
        return self._real(*args)

    def open(self) -> None:
        self._event.set()


def until(engine: Engine, is_true: Callable[[], bool]) -> None:
    """Train until a step boundary at which the condition is true."""
    for _ in range(2000):
        if is_true():
            return
        train(engine, 1)
    raise AssertionError("it did not come true within 2000 steps")


def seeded() -> None:
    """Seed the generators that a checkpoint holds; torch's is seeded with the model."""
    random.seed(11)
    np.random.seed(11)


def close(engine: Engine) -> Engine:
    engine.close()
    return engine


def unit_sizes(engine: Engine) -> list[UnitSize]:
    return [
        UnitSize(name=unit.name, numel=unit.numel, padded_numel=unit.padded_numel, trainable=unit.trainable)
        for unit in engine.core.layout.units
    ]


def saved_at_once(folder: str, stage: int) -> None:
    """Save the reference: the same training, saved before the call returns."""
    seeded()
    engine = make_engine(world_size=dist.get_world_size(), stage=stage)
    train(engine, 2)
    assert engine.save_checkpoint(folder, client_state={"at": (2, 3)}).durable


def saved_while_training(folder: str, stage: int) -> dict[str, Any]:
    """Save after step 2, change every weight in three more steps, then let the threads write."""
    seeded()
    engine = make_engine(world_size=dist.get_world_size(), stage=stage)
    gate = Gate()
    train(engine, 2)
    state = engine.checkpoint_state()
    client_state = {"at": [2, 3]}
    promised = engine.save_checkpoint(folder, client_state=client_state, asynchronous=True)
    client_state["at"].append(4)
    copied = engine.memory.live_bytes(MemoryKind.SNAPSHOT)
    train(engine, 3)
    before = engine.last_save
    gate.open()
    until(engine, lambda: engine.last_save is not None)
    assert engine.last_save is not None
    return {
        "before": before,
        "promised": (promised.durable, promised.step, promised.path.name),
        "durable": (engine.last_save.durable, engine.last_save.step, engine.last_save.path.name),
        "streams": sum(stream.numel * stream.dtype.itemsize for stream in state.streams.values()),
        "copied": copied,
        "formula": snapshot_bytes(memory_inputs(engine.config, unit_sizes(engine))),
        "kept": engine.memory.live_bytes(MemoryKind.SNAPSHOT),
        "waited": engine.wait_for_checkpoint(),
        "left": close(engine).memory.live_bytes(MemoryKind.SNAPSHOT),
    }


def fails_on_one_rank(folder: str, ending: str) -> tuple[str, int, str]:
    """Fill the disk of the last rank; return the error that this rank gets, and the folder's content."""
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = make_engine(world_size=world)
    train(engine, 1)
    engine.save_checkpoint(folder)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
    gate = Gate(full if rank == world - 1 else None)
    train(engine, 1)
    engine.save_checkpoint(folder, asynchronous=True)
    train(engine, 1)
    gate.open()
    endings: dict[str, Callable[[], object]] = {
        "step": lambda: until(engine, lambda: False),
        "wait": engine.wait_for_checkpoint,
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "close": engine.close,
    }
    try:
        endings[ending]()
    except CheckpointError as error:
        left = sorted(path.name for path in Path(folder).iterdir())
        return type(error).__name__, int(error.exit_code), str(left)
    raise AssertionError("nobody heard of it")


def loses_the_folder(folder: str) -> str:
    """Let another attempt take the folder over while the threads write."""
    engine = make_engine(world_size=dist.get_world_size())
    gate = Gate()
    train(engine, 1)
    engine.save_checkpoint(folder, asynchronous=True)
    dist.barrier()
    if dist.get_rank() == 0:
        take_over(Path(folder), Owner(attempt=2))
    dist.barrier()
    gate.open()
    try:
        engine.wait_for_checkpoint()
    except CheckpointError as error:
        return type(error).__name__
    return "committed"


def cannot_be_stored(folder: str) -> str:
    """Save while one rank's client state is not JSON: no rank may begin a save."""
    engine = make_engine(world_size=dist.get_world_size())
    train(engine, 1)
    bad = {"rng": [1.0, {"x": object()}]} if dist.get_rank() == 1 else {}
    try:
        engine.save_checkpoint(folder, client_state=bad, asynchronous=True)
    except CheckpointError as error:
        assert engine.wait_for_checkpoint() is None
        return str(error)
    return "begun"


def saves_twice(folder: str) -> list[str]:
    """Save twice in a row: the second save waits for the first, and a load sees the save in flight."""
    engine = make_engine(world_size=dist.get_world_size())
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint(folder, asynchronous=True, keep_last=1)
    train(engine, 1)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    names = sorted(entry.name for entry in Path(folder).iterdir() if entry.is_dir())
    return [path.name, *names, str(engine.global_steps)]
