"""Page-locked memory is registered exactly as long as it is mapped, in any order of releases.

The driver is a stand-in that answers as CUDA's does: on a GPU all offloaded data goes through it.
"""

from __future__ import annotations

import gc
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.forked import in_child
from zerotrain.runtime.offload import pages
from zerotrain.runtime.offload.pages import BufferPool, HostPages
from zerotrain.runtime.offload.resident import host_states
from zerotrain.runtime.offload.states import Encoding
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger

pytestmark = pytest.mark.ranks


SIZE = 5000


class Error(IntEnum):
    """Error codes of the driver, with its numbers."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2
    ALREADY_REGISTERED = 712


class Driver:
    """A driver that keeps a table by address, as CUDA's does."""

    cudaError = Error

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.gave_back: list[tuple[int, bool]] = []
        """Pairs (address, whether memory was still mapped there)."""
        self.is_full = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Error:
        assert flags == 1, "for every context"
        if self.is_full:
            return Error.OUT_OF_MEMORY
        if address in self.known:
            return Error.ALREADY_REGISTERED
        self.known[address] = num_bytes
        return Error.SUCCESS

    def cudaHostUnregister(self, address: int) -> Error:
        self.gave_back.append((address, is_mapped(address)))
        del self.known[address]
        return Error.SUCCESS

    def cudaGetErrorString(self, error: Error) -> str:
        return error.name


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(pages, "_runtime", lambda: found)
    return found


def test_it_is_unlocked_when_the_last_tensor_is_gone(driver: Driver) -> None:
    for _ in range(20):  # the system maps the next ones where the last ones were
        held = HostPages(SIZE, pinned=True)
        address, view = held.data.data_ptr(), held.data[100:].view(torch.int32)
        assert driver.known == {address: SIZE}
        del held
        gc.collect()
        assert driver.known, "a tensor is still over it"
        view.fill_(7)
        del view
        gc.collect()
        assert driver.gave_back.pop() == (address, True)
        assert not driver.known


def test_given_back_early_it_stays_readable(driver: Driver) -> None:
    held = HostPages(SIZE, pinned=True)
    held.data.fill_(3)
    held.release()
    held.release()
    assert [mapped for _, mapped in driver.gave_back] == [True]
    assert int(held.data.sum()) == 3 * SIZE
    del held
    gc.collect()
    assert len(driver.gave_back) == 1


def test_a_fork_takes_no_locked_pages_along(driver: Driver) -> None:
    """The kernel would copy them all, for each worker of a DataLoader."""
    locked, other = (HostPages(SIZE, pinned=pinned) for pinned in (True, False))
    for held in (locked, other):
        held.data.fill_(3)
    assert in_child(lambda: [int(held.data.sum()) for held in (locked, other)]) == [0, 3 * SIZE]
    assert int(locked.data.sum()) == 3 * SIZE


def test_buffers_are_replaced_when_the_device_has_read_them(driver: Driver) -> None:
    locked: list[int] = []
    pool = BufferPool(2, MemoryLedger(), pins=True)
    pool.grow(SIZE)
    pool.free[1].copied = SimpleNamespace(synchronize=lambda: locked.append(len(driver.known)))
    pool.grow(2 * SIZE)
    assert locked == [1], "its pages were unlocked during the copy"
    assert sorted(driver.known.values()) == [2 * SIZE] * 2


def test_what_is_not_locked_is_unknown_to_the_driver(driver: Driver) -> None:
    HostPages(SIZE, pinned=False).release()
    HostPages(0, pinned=True).release()
    assert not driver.known
    assert not driver.gave_back


def test_a_refusal_names_the_way_out(driver: Driver) -> None:
    driver.is_full = True
    with pytest.raises(RuntimeError, match=r"page-lock 5000 bytes .*OUT_OF_MEMORY.*ulimit -l.*pin_memory"):
        HostPages(SIZE, pinned=True)
    gc.collect()
    assert not driver.gave_back


def test_states_beside_a_gpu_are_not_locked(driver: Driver) -> None:
    """A stand-in for a unit on a GPU: only what a device copies is locked, and states are not."""
    unit: Any = SimpleNamespace(
        layout=SimpleNamespace(trainable=True),
        placement=SimpleNamespace(states_sharded=True, state_dtype=torch.float32),
        comm=SimpleNamespace(device=torch.device("cuda")),
        start=0,
        stop=SIZE,
    )
    ledger = MemoryLedger()
    states = host_states(unit, ("exp_avg",), Encoding.FULL, torch.ones(SIZE), ledger=ledger)
    assert ledger.live_bytes(MemoryKind.HOST_STATES) == 8 * SIZE
    assert states.load("master", 0, SIZE).sum() == SIZE
    assert not driver.known
    states.drop()
    assert ledger.live_bytes() == 0
