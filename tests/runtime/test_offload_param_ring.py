"""The buffers of spilled weights: whatever is read ahead, loaded, looked at and updated in whatever order,
everybody sees what was written last."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from tests.support.vaults import make_vault
from zerotrain.contract.memory.inputs import READ_BUFFERS, UPDATE_BUFFERS, UPLOAD_BUFFERS
from zerotrain.runtime.offload.param_ring import ParamRing
from zerotrain.runtime.offload.uploads import Uploads, WeightStaging
from zerotrain.runtime.vault.chunks import Record
from zerotrain.runtime.vault.store import Vault
from zerotrain.runtime.zero.ledger import Kind, MemoryLedger

SIZES = (4096, 12288, 8192, 4096, 16384, 8192, 4096)


class Bench:
    """A ring over records of several sizes, and what each record must hold."""

    def __init__(self, folder: Path) -> None:
        self.vault: Vault = make_vault(folder)
        self.records: list[Record] = [
            self.vault.add(f"unit{i}", [4096] * (size // 4096), swept=False) for i, size in enumerate(SIZES)
        ]
        self.vault.allocate()
        self.ledger = MemoryLedger()
        self.ring = ParamRing(self.vault, Uploads(torch.device("cpu")), self.ledger, pinned_for=None)
        self.ring.fit(max(SIZES), max(SIZES))
        self.holds = [0] * len(SIZES)
        for index in range(len(SIZES)):
            self.write_all(index, index)

    def write_all(self, index: int, value: int) -> None:
        with self.ring.gathers.window(self.records[index], writes=True, loads=False) as data:
            data.fill_(value)
        self.holds[index] = value

    def write_part(self, index: int, value: int) -> None:
        """Half by half, so that the rest must have been there."""
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
            self.read_ahead(index)  # too early: it must not bring what is out of date in a moment
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
    assert bench.ledger.peak_bytes(Kind.RING) == (READ_BUFFERS + UPDATE_BUFFERS) * max(SIZES)
    bench.vault.close()


@pytest.mark.parametrize("reads", [True, False])
def test_updates_in_the_background_while_others_are_used(tmp_path: Path, reads: bool) -> None:
    """As in the just-in-time step: each is waited for before its use, and the next ones are read ahead."""
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
    bench.vault.close()


def test_weights_of_a_device_are_computed_in_staging() -> None:
    """Two buffers in turn, as large as the largest; an update that fails writes nothing."""
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
        assert ledger.live_bytes(Kind.RING) == UPLOAD_BUFFERS * 4 * largest
    staging.close()
    assert ledger.live_bytes() == 0


def fail(staging: WeightStaging, weights: torch.Tensor, ledger: MemoryLedger) -> None:
    with staging.lend(weights, reads=False, ledger=ledger) as copy:
        copy.zero_()
        raise ZeroDivisionError
