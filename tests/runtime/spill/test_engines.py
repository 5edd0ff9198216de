"""State that all engines of one process share: the limit of its volume, and the measures against cores."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.forked import in_child
from tests.support.ranks import run_ranks
from zerotrain.contract.config import EngineConfig, load, resolve
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.offload import spill
from zerotrain.runtime.spill import sealers
from zerotrain.runtime.spill.errors import SpillDoesNotFit
from zerotrain.runtime.spill.store import SpillStore

pytestmark = pytest.mark.ranks


MIB = 1 << 20
_PR_GET_DUMPABLE = 3


def configured() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
    }


def opened(config: EngineConfig) -> SpillStore:
    """Return the spill store of the only rank."""
    comm = mock.Mock(spec=Comm, world_size=1, rank=0)
    spill_store = spill.open_spill_store(config, comm)
    assert spill_store is not None
    return spill_store


def environ(folder: Path) -> dict[str, str]:
    return {
        "ZEROTRAIN_NVME_PATH": str(folder),
        "ZEROTRAIN_NVME_BYTES": str(8 * MIB),
        "LOCAL_WORLD_SIZE": "1",
    }


def test_the_engines_of_a_process_share_its_limit(tmp_path: Path) -> None:
    """A spill store that is closed or dropped releases its part."""
    config = resolve(load(configured()), world_size=1)
    with mock.patch.dict(os.environ, environ(tmp_path)), mock.patch.object(spill, "refuse_cores"):
        first, second = opened(config), opened(config)
        for spill_store in (first, second):
            spill_store.add("unit", [MIB] * 5)
        first.allocate()
        with pytest.raises(SpillDoesNotFit, match="its limit is 8388608"):
            second.allocate()
        first.close()
        second.allocate()
        third = opened(config)
        third.add("unit", [MIB] * 5)
        with pytest.raises(SpillDoesNotFit):
            third.allocate()
        del second, spill_store
        gc.collect()
        third.allocate()
        third.close()


def guards() -> list[int]:
    dumpable = int(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))
    filtered = Path("/proc/self/coredump_filter").read_text() if os.geteuid() == 0 else "0"
    return [*resource.getrlimit(resource.RLIMIT_CORE), int(filtered, 16), dumpable]


def test_there_is_no_core_before_there_is_a_key(tmp_path: Path) -> None:
    """Cores are refused also while the weights are being spilled, which takes long."""
    config = resolve(load(configured()), world_size=1)

    def work() -> object:
        found = []
        create = sealers.create_sealer

        def spied(*args: Any) -> Any:
            found.append(guards())
            return create(*args)

        with (
            mock.patch.dict(os.environ, environ(tmp_path)),
            mock.patch.object(sealers, "create_sealer", spied),
        ):
            opened(config)
        return found

    assert in_child(work) == [[0, 0, 0, 0]]


def train(folder: str) -> list[int]:
    config = configured()
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = folder
    engine, *_ = zt.initialize(model=torch.nn.Linear(8, 8), config=config)
    found = guards()
    engine.close()
    return found


def test_a_process_with_an_engine_that_spills_writes_no_core(tmp_path: Path) -> None:
    assert run_ranks(1, train, str(tmp_path)) == [[0, 0, 0, 0]]
