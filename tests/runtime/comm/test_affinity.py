"""A rank's threads run near its GPU, on cores that the worker may use."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerotrain.runtime.comm import affinity

pytestmark = pytest.mark.unit

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xA1, pci_device_id=2)
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Describe a machine of two nodes, with the GPU on the second, in place of this one."""
    monkeypatch.setattr(affinity, "SYS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    device = tmp_path / "bus/pci/devices/0000:a1:02.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node, cores in enumerate(("0-3,8", "4-7,9-10\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    return tmp_path


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Record the cores of this process's threads, which may use 2 to 5 at first, instead of changing them."""
    cores: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: cores.setdefault(thread, {2, 3, 4, 5}))
    monkeypatch.setattr(os, "sched_setaffinity", cores.__setitem__)
    return cores


def test_all_threads_run_near_the_gpu(threads: dict[int, set[int]]) -> None:
    until = threading.Event()
    other = threading.Thread(target=until.wait)
    other.start()
    affinity.bind_to_node_of(CUDA)
    until.set()
    other.join()
    assert {os.getpid(), other.native_id} <= threads.keys()
    assert set(map(frozenset, threads.values())) == {frozenset({4, 5})}


def test_cores_that_a_user_chose_stay(threads: dict[int, set[int]], machine: Path) -> None:
    (machine / "devices/system/node/node1/cpulist").write_text("9-10")
    affinity.bind_to_node_of(CUDA)
    assert set(map(frozenset, threads.values())) == {frozenset({2, 3, 4, 5})}


@pytest.mark.parametrize("node", ["-1\n", "", "7\n"])
def test_an_unknown_node_changes_nothing(node: str, threads: dict[int, set[int]], machine: Path) -> None:
    (machine / "bus/pci/devices/0000:a1:02.0/numa_node").write_text(node)
    affinity.bind_to_node_of(CUDA)
    assert affinity.cores_near("0000:a1:02.0") == set()
    assert set(map(frozenset, threads.values())) == {frozenset({2, 3, 4, 5})}


def test_ranges_and_single_cores_are_read() -> None:
    assert affinity.cores_near("0000:a1:02.0") == {4, 5, 6, 7, 9, 10}
    assert affinity.cores_near("0000:00:00.0") == set()
