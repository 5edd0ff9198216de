"""The buffers of spilled weights: every reader sees the latest write.

The order of read-ahead, loads, reads and updates does not matter.
"""

from __future__ import annotations

import random
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from tests.support.spill_stores import make_spill_store
from zerotrain.contract.memory.inputs import READ_BUFFERS, UPDATE_BUFFERS, UPLOAD_BUFFERS
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.offload.pages import HostPages
from zerotrain.runtime.offload.param_ring import ParamRing
from zerotrain.runtime.offload.params import HostShard
from zerotrain.runtime.offload.transfer import Uploads, WeightStaging
from zerotrain.runtime.spill.chunks import Record
from zerotrain.runtime.spill.store import RecordIO, SpillStore
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger

pytestmark = pytest.mark.unit


SIZES = (4096, 12288, 8192, 4096, 16384, 8192, 4096)


class Bench:
    """A ring over records of several sizes, and the expected content of each record."""

    def __init__(self, folder: Path, uploads: Uploads | None = None) -> None:
        self.spill_store: SpillStore = make_spill_store(folder)
        self.records: list[Record] = [
            self.spill_store.add(f"unit{i}", [4096] * (size // 4096), swept=False)
            for i, size in enumerate(SIZES)
        ]
        self.spill_store.allocate()
        self.ledger = MemoryLedger()
        uploads = uploads or Uploads(torch.device("cpu"))
        self.ring = ParamRing(self.spill_store, uploads, self.ledger, pins=False)
        self.ring.fit(max(SIZES), max(SIZES))
        self.holds = [0] * len(SIZES)
        for index in range(len(SIZES)):
            self.write_all(index, index)

    def write_all(self, index: int, value: int) -> None:
        with self.ring.gathers.window(self.records[index], writes=True, loads=False) as data:
            data.fill_(value)
        self.holds[index] = value

    def write_part(self, index: int, value: int) -> None:
        """Write the halves one by one, so that the other half must have been loaded."""
        for half in range(2):
            with self.ring.gathers.window(self.records[index], writes=True) as data:
                data.chunk(2)[half].fill_(value)
        self.holds[index] = value

    def look(self, index: int) -> None:
        with self.ring.gathers.window(self.records[index]) as data:
            self.check(index, data)

    def gather(self, index: int) -> None:
        with self.ring.gathers.contents(self.records[index]) as data:
            self.check(index, data)

    def read_ahead(self, index: int) -> None:
        self.ring.gathers.read_ahead(self.records[index])

    def update(self, index: int, value: int, following: int | None, *, reads: bool) -> None:
        next_one = None if following is None else self.records[following]
        with self.ring.updating(self.records[index], reads=reads, following=next_one) as data:
            if reads:
                self.check(index, data)
            self.read_ahead(index)  # too early: it must not read data that becomes stale in a moment
            data.fill_(value)
        self.holds[index] = value

    def check(self, index: int, data: torch.Tensor) -> None:
        assert data.numel() == SIZES[index]
        assert bool((data == self.holds[index]).all()), index


@pytest.mark.parametrize("seed", range(6))
def test_everybody_sees_what_was_written_last(tmp_path: Path, seed: int) -> None:
    bench, chance = Bench(tmp_path), random.Random(seed)
    for number in range(600):
        index, other = chance.randrange(len(SIZES)), chance.choice([None, *range(len(SIZES))])
        match chance.randrange(7):
            case 0:
                bench.read_ahead(index)
            case 1:
                bench.gather(index)
            case 2:
                bench.look(index)
            case 3:
                bench.write_part(index, number % 251)
            case 4:
                bench.write_all(index, number % 251)
            case 5:
                bench.update(index, number % 251, None if other == index else other, reads=True)
            case _:
                bench.update(index, number % 251, None, reads=False)
    assert bench.ledger.peak_bytes(MemoryKind.RING) == (READ_BUFFERS + UPDATE_BUFFERS) * max(SIZES)
    bench.spill_store.close()


@pytest.mark.parametrize("reads", [True, False])
def test_updates_in_the_background_while_others_are_used(tmp_path: Path, reads: bool) -> None:
    """The just-in-time step works so: each update is waited for before its use, with read-ahead."""
    bench = Bench(tmp_path)
    count = len(SIZES)
    for step in range(1, 40):
        done = [Event() for _ in range(count)]
        failures: list[BaseException] = []

        def update_all(
            step: int = step, done: list[Event] = done, failures: list[BaseException] = failures
        ) -> None:
            try:
                for index in range(count):
                    following = index + 1 if reads and index + 1 < count else None
                    bench.update(index, 100 + step, following, reads=reads)
                    done[index].set()
            except BaseException as error:
                failures.append(error)
                for event in done:
                    event.set()

        thread = Thread(target=update_all)
        thread.start()
        for index in range(count):
            done[index].wait()
            bench.gather(index)
            for ahead in range(index + 1, count):
                if done[ahead].is_set() or step % 2:
                    bench.read_ahead(ahead)
        thread.join()
        assert not failures, failures
        for index in reversed(range(count)):
            bench.gather(index)
            bench.read_ahead(index - 1)
    bench.spill_store.close()


def test_weights_of_a_device_are_computed_in_staging() -> None:
    """Two buffers in rotation, as large as the largest; an update that fails writes nothing."""
    staging, ledger = WeightStaging(torch.device("cpu"), pins=False), MemoryLedger()
    largest = 0
    for size in (64, 256, 128):
        weights = torch.arange(size, dtype=torch.float32)
        with staging.lend(weights, reads=True, ledger=ledger) as copy:
            assert copy.data_ptr() != weights.data_ptr()
            assert torch.equal(copy, weights)
            copy.add_(1)
            assert weights[0] == 0
        assert torch.equal(weights, torch.arange(size) + 1.0)
        with pytest.raises(ZeroDivisionError):
            fail(staging, weights, ledger)
        assert torch.equal(weights, torch.arange(size) + 1.0)
        largest = max(largest, size)
        assert ledger.live_bytes(MemoryKind.RING) == UPLOAD_BUFFERS * 4 * largest
    staging.close()
    assert ledger.live_bytes() == 0


def fail(staging: WeightStaging, weights: torch.Tensor, ledger: MemoryLedger) -> None:
    with staging.lend(weights, reads=False, ledger=ledger) as copy:
        copy.zero_()
        raise ZeroDivisionError


class Copies(Uploads):
    """Double of a device that still computes: copies are in flight until they are waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks: list[Copy] = []

    def mark(self) -> Copy:
        self.marks.append(Copy())
        return self.marks[-1]

    def finish(self) -> None:
        for mark in self.marks:
            mark.synchronize()


class Copy:
    """An event."""

    def __init__(self) -> None:
        self.was_awaited = False

    def query(self) -> bool:
        return self.was_awaited

    def synchronize(self) -> None:
        self.was_awaited = True


def test_updates_wait_for_no_copy_of_others(tmp_path: Path) -> None:
    """Updates must not wait for copies to the device.

    These end once the device has computed everything before them, so updates would run at its pace.
    """
    uploads, ledger = Copies(), MemoryLedger()
    pages = [HostPages(64, pinned=False) for _ in range(2)]
    first, second = (
        HostShard(page, torch.zeros(16), torch.float32, uploads=uploads, ledger=ledger) for page in pages
    )
    for shard in (first, second):
        shard.send(torch.empty(16), lambda _: Pending.done())
    with first.to_update(reads=False, device=torch.device("cpu")):
        pass
    assert [mark.was_awaited for mark in uploads.marks] == [True, False]

    bench = Bench(tmp_path, uploads := Copies())
    for index in (0, 1):
        bench.gather(index)
    bench.update(2, 77, None, reads=False)
    assert [mark.was_awaited for mark in uploads.marks] == [False, False]
    for index in range(len(SIZES)):
        bench.gather(index)
    bench.spill_store.close()


class Slow:
    """A slow transfer."""

    def __init__(self, io: RecordIO, done: list[Record], record: Record) -> None:
        self._io, self._done, self._record = io, done, record

    def wait(self) -> None:
        self._io.wait()
        self._done.append(self._record)


def test_weights_on_their_way_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next update's weights may be those that were written just now."""
    bench = Bench(tmp_path)
    written: list[Record] = []
    write, read = bench.spill_store.start_write, bench.spill_store.start_read

    def start_write(record: Record, buffer: torch.Tensor) -> Slow:
        return Slow(write(record, buffer), written, record)

    def start_read(record: Record, buffer: torch.Tensor) -> RecordIO:
        assert record is not bench.records[1] or record in written
        return read(record, buffer)

    monkeypatch.setattr(bench.spill_store, "start_write", start_write)
    monkeypatch.setattr(bench.spill_store, "start_read", start_read)
    bench.update(1, 5, None, reads=False)
    bench.update(2, 6, 1, reads=False)
    bench.update(1, 7, None, reads=True)
    bench.spill_store.close()
