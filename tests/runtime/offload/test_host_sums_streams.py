"""Order of the work on CUDA's streams for sums in host memory: nothing is used before it is there.

Streams are stand-ins that remember what they wait for. All work is done at once; each operation is compared
with the operations that are ordered before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zerotrain.runtime.comm import sums
from zerotrain.runtime.offload import host_sums
from zerotrain.runtime.offload.host_sums import HostSums
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.shards import Placement

pytestmark = pytest.mark.unit


NUMEL, TILE = 10, 4


class Stream:
    """A stream that knows the operations that are over when its next one begins."""

    def __init__(self, device: object = None) -> None:
        self.before: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def run(self, operation: str) -> None:
        self.before.add(operation)


class Event:
    def __init__(self) -> None:
        self.before: set[str] = set()
        self.is_over = False

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class Device:
    """The streams of a stand-in device, and what ran on them."""

    def __init__(self) -> None:
        self.main = Stream()
        self.current = self.main
        self.log: list[tuple[str, set[str]]] = []
        """Operations with those before them."""

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def ran(self, kind: str) -> None:
        number = sum(name.startswith(kind) for name, _ in self.log)
        operation = f"{kind} {number}"
        self.log.append((operation, set(self.current.before)))
        self.current.run(operation)

    def before(self, operation: str) -> set[str]:
        return next(before for name, before in self.log if name == operation)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, add, copy = Device(), sums.accumulate_, torch.Tensor.copy_
    monkeypatch.setattr(host_sums, "_new_stream", lambda _device: Stream())
    monkeypatch.setattr(host_sums, "tile_numel", TILE)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: found.main)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def accumulate(tile: torch.Tensor, parts: list[torch.Tensor], scale: float, *, overwrite: bool) -> None:
        found.ran("add")
        add(tile, parts, scale, overwrite=overwrite)

    def copied(into: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        found.ran("copy")
        return copy(into, source)

    monkeypatch.setattr(host_sums, "accumulate_", accumulate)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    return found


class Unit:
    start, stop = 0, NUMEL
    placement = Placement.of_stage(2, world_size=2)


def made(ledger: MemoryLedger, count: int) -> list[Any]:
    maker = HostSums(torch.device("cpu"), leaves=lambda _unit: True, pins=False)
    unit: Any = Unit()
    return [maker.make(unit, ledger) for _ in range(count)]


def test_sums_follow_the_main_stream_and_earlier_copies(device: Device) -> None:
    one, two = made(MemoryLedger(), 2)
    parts = [torch.full((NUMEL,), 2.0), torch.full((NUMEL,), 3.0)]
    device.main.run("backward of one")
    one.add(parts, 0.5, overwrite=True)
    device.main.run("backward of two")
    two.add(parts, 0.5, overwrite=True)
    device.main.run("the next pass")
    one.add(parts, 1.0, overwrite=False)
    assert "backward of one" in device.before("add 0")
    assert "backward of two" not in device.before("add 2")
    assert "backward of two" in device.before("add 3")
    assert "the next pass" in device.before("add 6")
    # Three tiles each: copies 0 to 5 go down; then every second one goes up, into the tile before last.
    assert {"copy 0", "copy 1", "copy 2", "copy 4"} <= device.before("copy 6"), "up: the sum and the tile"
    assert "copy 6" in device.before("add 6")
    assert "add 6" in device.before("copy 7")
    assert "copy 5" in device.before("copy 8")
    assert "copy 7" not in device.before("copy 8"), "one tile goes up while the other goes down"
    assert "copy 7" in device.before("copy 10")
    one.wait()
    assert one.values.tolist() == [7.5] * NUMEL
    assert sum(map(float, one.squares())) == NUMEL * 7.5**2
    assert two.values.tolist() == [2.5] * NUMEL


def test_the_parts_of_one_unit_stay_alive_beside_the_next(device: Device) -> None:
    ledger = MemoryLedger()
    one, two = made(ledger, 2)
    parts = [torch.ones(NUMEL)]
    one.add(parts, 1.0, overwrite=True)
    assert ledger.live_bytes(MemoryKind.REDUCE) == 4 * NUMEL
    assert "add 2" not in device.main.before, "the main stream goes on"
    two.add(parts, 1.0, overwrite=True)
    assert "add 2" in device.main.before, "what it computes next may use the first unit's memory again"
    assert "add 3" not in device.main.before
    assert ledger.live_bytes(MemoryKind.REDUCE) == 4 * NUMEL
    one.wait()
    assert ledger.live_bytes(MemoryKind.REDUCE) == 4 * NUMEL, "the second unit's parts are still read"
    two.wait()
    assert ledger.live_bytes(MemoryKind.REDUCE) == 0
    kept = ledger.live_bytes(MemoryKind.GRADS), ledger.live_bytes(MemoryKind.HOST_GRADS)
    assert kept == (2 * 4 * TILE, 2 * 4 * NUMEL)
    one.drop()
    assert ledger.live_bytes(MemoryKind.HOST_GRADS) == 4 * NUMEL


def test_what_others_write_is_measured_again(device: Device) -> None:
    (one,) = made(MemoryLedger(), 1)
    one.add([torch.ones(NUMEL)], 1.0, overwrite=True)
    assert one.squares()
    one.wait()
    one.values[3:5].mul_(2.0)
    assert not one.squares()


def test_tiles_are_replaced_when_they_are_sent(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that become trainable between two micro-batches may be larger than those before."""
    maker = HostSums(torch.device("cpu"), leaves=lambda _unit: True, pins=False)
    unit: Any = Unit()
    one: Any = maker.make(unit, MemoryLedger())
    one.add([torch.ones(NUMEL)], 1.0, overwrite=True)
    waited: list[Event] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    maker.make(unit, MemoryLedger())
    assert not waited
    monkeypatch.setattr(host_sums, "tile_numel", NUMEL)
    maker.make(unit, MemoryLedger())
    assert any("copy 2" in event.before for event in waited), "the last copy from the tiles"


def test_the_memory_of_tiles_is_of_the_stream_that_writes_last(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may be dropped while sums are sent: what the main stream allocates next stays as it is."""
    owners: list[Stream] = []
    empty = torch.empty

    def make(*size: int, **settings: Any) -> torch.Tensor:
        owners.append(device.current)
        return empty(*size, **settings)

    monkeypatch.setattr(torch, "empty", make)
    (one,) = made(MemoryLedger(), 1)
    one.add([torch.ones(NUMEL)], 1.0, overwrite=True)
    assert len(owners) == 2
    assert all("add 0" in owner.before and owner is not device.main for owner in owners)


def test_a_sum_comes_back_after_it_went(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sums, "tile_numel", NUMEL)
    (one,) = made(MemoryLedger(), 1)
    for overwrite in (True, False):
        one.add([torch.ones(NUMEL)], 1.0, overwrite=overwrite)
    assert "copy 0" in device.before("copy 1"), "it was sent from the other tile"
    one.wait()
    assert one.values.tolist() == [2.0] * NUMEL
