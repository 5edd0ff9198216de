"""A failed save is counted, whichever call of the program raises it: an alert uses that counter."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.background_saves import Gate, until
from tests.support.checkpoint_engines import make_engine, train
from tests.support.ranks import run_ranks
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.checkpoint import CheckpointError
from zerotrain.runtime.train.engine_events import EngineEvents
from zerotrain.runtime.train.report import Reporter

pytestmark = pytest.mark.ranks


def failures(folder: str, found_by: str) -> list[float | None]:
    """The counter of this rank before and after a disk was full on rank 1."""
    rank = dist.get_rank()
    launch = LaunchSpec(
        job="demo", job_uid="u", attempt=1, master_addr="x", world_size=2, node_rank=0, config_path=Path("c")
    )
    environ = RankEnv(rank=rank, local_rank=rank, local_world_size=2)
    reporter = Reporter.start(launch, environ, RankChannel(None, rank=rank))

    def counted() -> float | None:
        labels = {"job_name": "demo", "rank": str(rank)}
        return reporter.metrics.registry.get_sample_value("zerotrain_checkpoint_failures_total", labels)

    engine = make_engine(world_size=2)
    engine.observer = EngineEvents(reporter)
    reporter.ready(engine)
    train(engine, 1)
    engine.save_checkpoint(folder)
    found = [counted()]
    gate = Gate(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder) if rank == 1 else None)
    train(engine, 1)
    engine.save_checkpoint(folder, asynchronous=True)
    gate.open()
    endings: dict[str, Callable[[], object]] = {
        "step": lambda: until(engine, lambda: False),
        "wait": engine.wait_for_checkpoint,
        "save": lambda: engine.save_checkpoint(folder),
        "close": engine.close,
    }
    try:
        endings[found_by]()
    except CheckpointError:
        found.append(counted())
    engine.close()
    return found


@pytest.mark.parametrize("found_by", ["step", "wait", "save", "close"])
def test_a_save_that_fails_in_the_background_is_counted_once(tmp_path: Path, found_by: str) -> None:
    assert run_ranks(2, failures, str(tmp_path), found_by) == [[0.0, 1.0]] * 2
