"""States that exceed the host's memory or the disk are refused before allocation, on every rank alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.memory import UnitSize, padded_numel
from zerotrain.contract.memory.nearest import Hardware, Needs, nearest, needs_of
from zerotrain.runtime.offload import fit
from zerotrain.runtime.offload.fit import DoesNotFit
from zerotrain.runtime.offload.free_memory import FreeMemory, disk_free, free_memory
from zerotrain.runtime.train.exits import exit_code_of

GIB = 1 << 30
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
NVME: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"}


@pytest.mark.unit
def test_the_machine(tmp_path: Path) -> None:
    available = free_memory(tree(tmp_path, MACHINE))
    assert (available.limit, available.free) == (64 * GIB, 32 * GIB)


@pytest.mark.unit
def test_cgroup_v2_counts_use_but_no_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/main\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{6 * GIB}\n",
        # 4 GiB of files, of which 1 GiB is tmpfs, which cannot be reclaimed.
        f"{group}/memory.stat": f"anon {2 * GIB}\nfile {4 * GIB}\nshmem {GIB}\nslab_reclaimable 0\n",
        f"{group}/main/memory.max": "max\n",
        f"{group}/main/memory.current": f"{6 * GIB}\n",
    }
    available = free_memory(tree(tmp_path, {**MACHINE, **files}))
    assert (available.limit, available.used, available.free) == (8 * GIB, 3 * GIB, 5 * GIB)
    assert "pod1" in available.source


@pytest.mark.unit
def test_cgroup_v1(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/x\n8:memory:/docker/abc\n0::/x\n",
        # In a container the mount is the group: the path outside does not exist there.
        f"{mount}/memory.limit_in_bytes": f"{4 * GIB}\n",
        f"{mount}/memory.usage_in_bytes": f"{3 * GIB}\n",
        f"{mount}/memory.stat": f"cache 1\ntotal_cache {2 * GIB}\ntotal_shmem {GIB}\n",
    }
    available = free_memory(tree(tmp_path, {**MACHINE, **files}))
    assert (available.limit, available.free) == (4 * GIB, 2 * GIB)
    (tmp_path / mount / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert free_memory(tmp_path).limit == 64 * GIB


@pytest.mark.unit
def test_the_disk(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    one = disk_free([tmp_path])
    assert one == pytest.approx(found.f_bavail * found.f_frsize, rel=0.1)
    assert disk_free([tmp_path, tmp_path]) == pytest.approx(one, rel=0.1), "one disk was counted twice"
    if os.access("/dev/shm", os.W_OK) and os.stat("/dev/shm").st_dev != tmp_path.stat().st_dev:
        least = min(one or 0, disk_free([Path("/dev/shm")]) or 0)
        both = disk_free([tmp_path, Path("/dev/shm"), tmp_path])
        assert both == pytest.approx(min(3 * least, 3 * (one or 0) / 2), rel=0.1)
    assert disk_free([tmp_path / "to" / "be" / "made"]) is not None
    (tmp_path / "file").write_text("")
    assert disk_free([tmp_path, tmp_path / "file"]) is None
    assert disk_free([tmp_path / "file" / "below"]) is None


def configured(*, bf16: dict[str, Any] | None = None, **zero: Any) -> EngineConfig:
    file = {"bf16": {"enabled": True, **(bf16 or {})}, "zero_optimization": zero}
    return resolve(load(file), world_size=2)


def units(world_size: int) -> list[UnitSize]:
    """Return ten units of one Mi elements."""
    return [
        UnitSize(name=str(index), numel=2**20, padded_numel=padded_numel(2**20, world_size))
        for index in range(10)
    ]


MI = 2**20
GPU = Hardware()
HOST = Hardware(on_host=True)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "available", "hardware", "changes"),
    [
        (
            configured(stage=2, bf16={"store_param_remainders": False}, **CPU),
            Needs(host=75 * MI, disk=0),
            GPU,
            ('"bf16": {"store_param_remainders": true}',),
        ),
        (
            configured(stage=2, **CPU),
            Needs(host=62 * MI, disk=2**40, accelerator=2**40),
            GPU,
            ('"offload_optimizer": {"ratio": 0.75}',),
        ),
        (
            configured(stage=2, **CPU),
            Needs(host=75 * MI, disk=2**40),
            HOST,
            ('"offload_optimizer": {"device": "nvme"}',),
        ),
        (
            configured(stage=2, **CPU),
            Needs(host=75 * MI, disk=0),
            HOST,
            ("4 ranks, as many per worker as now",),
        ),
        (
            configured(stage=1, **NVME),
            Needs(host=2**40, disk=80 * MI // 2),
            HOST,
            ('"offload_optimizer": {"device": "cpu"}',),
        ),
    ],
    ids=["remainders", "ratio", "nvme", "ranks", "back to memory"],
)
def test_the_nearest_setting(
    config: EngineConfig, available: Needs, hardware: Hardware, changes: tuple[str, ...]
) -> None:
    assert not needs_of(config, units(2), hardware).within(available)
    found = nearest(config, units(2), available, hardware, has_folder=True)
    assert found is not None
    assert found.changes == changes
    assert found.needs.within(available)


@pytest.mark.unit
def test_two_changes_before_none() -> None:
    config = configured(stage=0, bf16={"store_param_remainders": False}, **CPU)
    available = Needs(host=100 * MI, disk=60 * MI)
    found = nearest(config, units(2), available, HOST, has_folder=False)
    assert found is not None
    assert len(found.changes) == 2
    assert nearest(config, units(2), Needs(host=1, disk=0), HOST, has_folder=True) is None


def start(limit: int | None, zero: dict[str, Any], environ: dict[str, str]) -> tuple[str, int]:
    """Return how `initialize` ends on a host with so much memory, and the process's exit code."""
    available = FreeMemory(limit=limit or 2**40, used=0, source="test")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    with (
        mock.patch.object(fit, "free_memory", return_value=available),
        mock.patch.dict(os.environ, environ),
        mock.patch("zerotrain.runtime.setup.take_values", side_effect=AssertionError("allocated")),
    ):
        try:
            zt.initialize(model=nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), config=config)
        except (DoesNotFit, ConfigError) as error:
            return str(error), exit_code_of(error)
        except AssertionError as error:
            return str(error), 0
    raise AssertionError("nothing was allocated")


@pytest.mark.ranks
def test_memory_of_all_ranks_of_a_host() -> None:
    """Two ranks have one Mi elements: each would fit alone."""
    found = run_ranks(2, start, 20 * 2**20, {"stage": 0, **CPU}, {})
    assert found[0] == found[1]
    text, code = found[0]
    assert code == ExitCode.DOES_NOT_FIT
    assert "ranks 0 to 1 of one host need" in text
    assert "of 20.0 MiB are free" in text
    assert "Nearest that fits: " in text


@pytest.mark.unit
def test_every_rank_takes_its_model_over() -> None:
    """The memory in use holds the models of all ranks of a host, and each engine frees its own."""
    row = fit._Row(
        host=4.5 * GIB,
        disk=0,
        memory_limit=20 * GIB,
        memory_used=9 * GIB,
        taken_over=2 * GIB,
        disk_limit=-1,
        disk_free=-1,
        accelerator_free=-1,
    )
    host = fit._Host(first_rank=0, rows=[row] * 4)
    assert host.memory_free == 19 * GIB
    assert not host.lacks_memory


@pytest.mark.ranks
def test_the_disk_of_all_ranks(tmp_path: Path) -> None:
    environ = {
        "ZEROTRAIN_NVME_PATH": str(tmp_path),
        "ZEROTRAIN_NVME_BYTES": str(8 * 2**20),
        "LOCAL_WORLD_SIZE": "2",
    }
    found = run_ranks(2, start, None, {"stage": 2, **NVME}, environ)
    assert found[0] == found[1]
    text, code = found[0]
    assert code == ExitCode.DOES_NOT_FIT
    assert "4.0 MiB are allowed each" in text
    assert '"offload_optimizer": {"device": "cpu"}' in text


@pytest.mark.ranks
def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "file")}}
    for text, code in run_ranks(2, start, None, wrong, {}):
        assert code == ExitCode.BAD_CONFIG
        assert "must be a folder that every rank can create and write to" in text
        assert "zero_optimization.offload_optimizer.nvme_path" in text
    for zero, environ, key in (
        ({"spill": {"paths": [str(tmp_path / "file")]}}, {}, "zero_optimization.spill.paths"),
        ({}, {"ZEROTRAIN_NVME_PATH": str(tmp_path / "file")}, "ZEROTRAIN_NVME_PATH"),
    ):
        ((text, code),) = run_ranks(1, start, None, {"stage": 2, **NVME, **zero}, environ)
        assert (code, key in text) == (ExitCode.BAD_CONFIG, True), text
    ((text, code),) = run_ranks(1, start, None, {"stage": 2, **NVME}, {})
    assert code == ExitCode.BAD_CONFIG
    assert "must name a folder on a fast local disk" in text


@pytest.mark.ranks
def test_what_fits_starts_and_what_offloads_nothing_is_not_asked() -> None:
    assert run_ranks(1, start, 2**30, {"stage": 1, **CPU}, {}) == [("allocated", 0)]
    assert run_ranks(1, start, 1, {"stage": 1}, {}) == [("allocated", 0)]


@pytest.mark.ranks
def test_the_job_and_the_file_must_agree_on_encryption(tmp_path: Path) -> None:
    zero = {"stage": 2, **NVME, "spill": {"encryption": "AEAD"}}
    environ = {"ZEROTRAIN_NVME_PATH": str(tmp_path), "ZEROTRAIN_NVME_ENCRYPTION": "None"}
    ((text, code),) = run_ranks(1, start, None, zero, environ)
    assert code == ExitCode.BAD_CONFIG
    assert "must equal the job's, which is None" in text
