"""The loader of `initialize`: a new order in every epoch, every sample on one rank, a resumable position."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.runtime.data.epochs import EpochLoader, make_loader
from zerotrain.runtime.deepspeed.utils import RepeatingLoader


class Stream(IterableDataset[Any]):
    """Numbers from 0; the data set knows the epoch only from `set_epoch`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Clock:
    steps = 0


def loader_of(
    data: Any, rank: int = 0, world_size: int = 1, *, micro: int = 2, drop_last: bool = False
) -> tuple[EpochLoader, Clock]:
    made = make_loader(
        data,
        rank=rank,
        world_size=world_size,
        micro_batch_size=micro,
        drop_last=drop_last,
        collate_fn=list,
    )
    clock = Clock()
    made.steps_taken = lambda: clock.steps
    return made, clock


def rows(loader: Any) -> list[int]:
    return [int(row) for batch in loader for row in batch]


def torchs(size: int, rank: int, world_size: int, epoch: int, *, drop_last: bool = False) -> list[int]:
    data: Any = range(size)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data,
        num_replicas=world_size,
        rank=rank,
        drop_last=drop_last,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.unit
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 16, 17])
def test_every_epoch_is_torchs_order_of_that_epoch(size: int, world_size: int) -> None:
    for rank in range(world_size):
        loader, _ = loader_of(list(range(size)), rank, world_size)
        for epoch in range(3):
            assert rows(loader) == torchs(size, rank, world_size, epoch)


@pytest.mark.unit
def test_an_epoch_chosen_by_hand_is_taken_and_the_next_follows_it() -> None:
    loader, _ = loader_of(list(range(9)))
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    for epoch in (0, 1, 1, 7):
        sampler.set_epoch(epoch)
        assert rows(loader) == torchs(9, 0, 1, epoch)
    assert rows(loader) == torchs(9, 0, 1, 8)


@pytest.mark.unit
def test_a_look_at_the_data_does_not_begin_an_epoch_and_an_early_break_does() -> None:
    loader, clock = loader_of(list(range(8)))
    first = next(iter(loader))
    assert next(iter(loader)) == first
    for batch in loader:
        assert batch == first
        clock.steps += 1
        break
    assert rows(loader) == torchs(8, 0, 1, 1)


@pytest.mark.unit
def test_a_repeating_loader_goes_through_the_epochs() -> None:
    loader, _ = loader_of(list(range(6)))
    found = [row for batch in itertools.islice(RepeatingLoader(loader), 9) for row in batch]
    assert found == [row for epoch in range(3) for row in torchs(6, 0, 1, epoch)]


@pytest.mark.unit
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("trained", [0, 1, 3, 4, 5, 8])
def test_a_loader_goes_on_where_another_was(trained: int, is_stream: bool) -> None:
    def data() -> Any:
        return Stream(8) if is_stream else list(range(8))

    uninterrupted = list(itertools.islice(RepeatingLoader(loader_of(data())[0]), 12))
    loader, clock = loader_of(data())
    batches = RepeatingLoader(loader)
    for _ in range(trained):
        next(batches)
        clock.steps += 1
    resumed, _ = loader_of(data())
    going_on = RepeatingLoader(resumed)  # made before the load
    resumed.load_state_dict(loader.state_dict())
    assert list(itertools.islice(going_on, 12 - trained)) == uninterrupted[trained:]


@pytest.mark.unit
def test_a_place_holds_for_other_numbers_of_ranks() -> None:
    """Two ranks train half an epoch; one, and four, continue with the other half."""
    seen: list[int] = []
    states = []
    for rank in range(2):
        loader, clock = loader_of(list(range(16)), rank, 2)
        for batch in itertools.islice(loader, 2):
            seen += batch
            clock.steps += 1
        states.append(loader.state_dict())
    assert states[0] == states[1] == {"epoch": 0, "samples": 8, "size": 16}
    for world_size in (1, 4):
        rest: list[int] = []
        for rank in range(world_size):
            loader, _ = loader_of(list(range(16)), rank, world_size)
            loader.load_state_dict(states[0])
            rest += rows(loader)
        assert sorted(seen + rest) == list(range(16))
    other, _ = loader_of(list(range(12)))
    other.load_state_dict(states[0])
    assert rows(other) == torchs(12, 0, 1, 0), "of other data the epoch starts anew"


@pytest.mark.unit
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 11])
def test_a_stream_is_dealt_out_evenly(size: int, world_size: int, drop_last: bool) -> None:
    parts = []
    for rank in range(world_size):
        stream = Stream(size)
        loader, _ = loader_of(stream, rank, world_size, micro=1, drop_last=drop_last)
        parts.append(rows(loader))
        assert rows(loader) == parts[-1]
        assert stream.epochs == [0, 1]
    assert len({len(part) for part in parts}) == 1, "as many on every rank"
    counts = Counter(row for part in parts for row in part)
    if drop_last:
        assert sorted(counts.elements()) == list(range(size // world_size * world_size))
    else:
        assert sorted(counts) == list(range(size))
        assert sum(counts.values()) == -(-size // world_size) * world_size
        assert all(row < world_size for row, times in counts.items() if times > 1)


class OfWorkers(Stream):
    """A data set that divides itself among the workers of a loader, as torch's documentation requires."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(self.size)[worker.id :: worker.num_workers] if worker else range(self.size))


@pytest.mark.ranks
def test_a_streams_own_division_among_workers_holds() -> None:
    found: list[int] = []
    for rank in range(2):
        loader, _ = loader_of(OfWorkers(16), rank, 2)
        found += rows(DataLoader(loader.dataset, batch_size=2, num_workers=2, collate_fn=list))
    assert sorted(found) == list(range(16))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.unit
@pytest.mark.parametrize(
    ("data", "found"),
    [
        ((number for number in range(4)), "got generator"),
        (WithoutLength(), "got WithoutLength"),
        (DataLoader([1, 2]), "got DataLoader"),  # type: ignore[arg-type]
        ({"train": [1, 2]}, r"got dict with the keys \['train'\]: pass one of its values"),
        ([], "has 0 samples, but needs at least one"),
    ],
)
def test_what_is_no_data_set_is_refused(data: Any, found: str) -> None:
    with pytest.raises((TypeError, ValueError), match=found):
        loader_of(data)


@pytest.mark.unit
def test_data_too_small_for_one_whole_batch_each_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 7 samples, but with dataloader_drop_last .* 4 ranks takes 8"):
        loader_of(list(range(7)), 0, 4, drop_last=True)
    assert len(rows(loader_of(list(range(8)), 0, 4, drop_last=True)[0])) == 2


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}


def resume(folder: str) -> list[list[float]]:
    """Return batches of a run of 6 updates, and of one that is stopped after 4 and resumed."""

    def start() -> Any:
        data = TensorDataset(torch.arange(24.0)[:, None])
        engine, _, loader, _ = zt.initialize(model=nn.Linear(1, 1), config=CONFIG, training_data=data)
        assert loader is not None
        return engine, RepeatingLoader(loader)

    def train(engine: Any, batches: Any, steps: int) -> list[float]:
        seen = []
        while engine.global_steps < steps:
            (batch,) = next(batches)
            seen += batch.flatten().tolist()
            engine.backward(engine(batch).mean())
            engine.step()
        return seen

    engine, batches = start()
    whole = train(engine, batches, 6)
    engine, batches = start()
    parts = train(engine, batches, 4)
    engine.save_checkpoint(folder)
    engine, batches = start()
    engine.load_checkpoint(folder)
    return [whole, parts + train(engine, batches, 6)]


@pytest.mark.ranks
def test_a_resumed_run_sees_the_data_of_an_uninterrupted_one(tmp_path: Any) -> None:
    for whole, resumed in run_ranks(2, resume, str(tmp_path)):
        assert resumed == whole
        assert whole[:12] != whole[12:], "two epochs, in two orders"
