"""The loader that `initialize` makes: every rank reads its part of the data, in a new order in every epoch.

An epoch ends when an iteration has returned all its batches, or when an iteration begins after steps were
taken in the previous one (a `break` out of the loop). An iteration without training, such as a look at the
first batch, does not count: such a look on one rank must not put the ranks into different orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


class EpochSampler(DistributedSampler[Any]):
    """torch's sampler, extended to leave out the samples that an epoch has used already."""

    skipped = 0
    """Samples of this rank that the next iteration leaves out."""
    is_chosen = False
    """Whether `set_epoch` was called since the last iteration began."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch next."""
        super().set_epoch(epoch)
        self.is_chosen = True

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), self.skipped, None)


class RankPart(IterableDataset[Any]):
    """A stream's items dealt out in turn: item i goes to rank i modulo the number of ranks.

    Every rank iterates over the whole stream, which must yield the same items on every rank, and keeps its
    own. All ranks have equally many items: an incomplete last round is filled with items of the first round,
    or left out with `drop_last`. Within a worker of a loader the stream is what the data set yields there:
    splitting it by `torch.utils.data.get_worker_info()` is up to the data set, as in torch.
    """

    def __init__(self, data: IterableDataset[Any], *, rank: int, world_size: int, drop_last: bool) -> None:
        self.data = data
        self.epoch = self.skipped = 0
        """Epoch of the next iteration, and `EpochSampler.skipped` for it."""
        self.is_chosen = False
        self._rank, self._world_size, self._drop_last = rank, world_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch next; a stream that has a `set_epoch` is given the epoch, and may shuffle by it."""
        self.epoch, self.is_chosen = epoch, True

    def __iter__(self) -> Iterator[Any]:
        set_epoch = getattr(self.data, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        return itertools.islice(self._own(), self.skipped, None)

    def _own(self) -> Iterator[Any]:
        first: list[Any] = []
        items = iter(self.data)
        while round_items := list(itertools.islice(items, self._world_size)):
            missing = self._world_size - len(round_items)
            if missing and self._drop_last:
                return
            first = first or list(round_items)
            round_items += itertools.islice(itertools.cycle(first), missing)
            yield round_items[self._rank]

    def __len__(self) -> int:
        """Return the number of this rank's items. Raises TypeError for a stream of unknown length."""
        whole: int = len(self.data)  # type: ignore[arg-type]
        return whole // self._world_size if self._drop_last else -(-whole // self._world_size)


class EpochLoader(DataLoader[Any]):
    """Micro-batches of this rank.

    `loader.sampler.set_epoch(n)`, for a stream `loader.dataset.set_epoch(n)`, chooses an epoch explicitly.
    """

    def __init__(
        self,
        source: EpochSampler | RankPart,
        *,
        micro_batch_size: int,
        world_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        drop_last: bool,
    ) -> None:
        data: Dataset[Any] = source if isinstance(source, RankPart) else source.dataset
        super().__init__(
            data,
            batch_size=micro_batch_size,
            sampler=source if isinstance(source, EpochSampler) else None,
            collate_fn=collate_fn,
            drop_last=drop_last,
        )
        self._source = source
        self._round = micro_batch_size * world_size
        """Samples that all ranks together have in one batch each."""
        self._epoch = 0
        self._start = self._given = 0
        """Batches of the epoch that were returned before the running iteration, and so far."""
        self._is_over = self._is_restored = False
        self._steps_before = 0
        self._running: EpochIterator | None = None
        self._loads = 0
        self.steps_taken: Callable[[], int] = lambda: 0
        """Number of `step()` calls so far; the engine sets its own function here."""
        self.on_batch: Callable[[int, int, bool], None] = lambda _epoch, _batches, _ended: None
        """Called with the epoch and the batches so far: for every batch, and with True after the last one."""
        self.around: Callable[[Iterator[Any]], Iterator[Any]] = lambda batches: batches
        """Wrapper that every iteration passes through."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.around(EpochIterator(self))

    @property
    def epoch(self) -> int:
        """Epoch of the running iteration, or else of the last one."""
        return self._epoch

    def was_moved(self, iterator: EpochIterator) -> bool:
        """Return whether a state was loaded since the iteration began."""
        return iterator.loads != self._loads

    def begin(self, iterator: EpochIterator) -> Iterator[Any]:
        """Return the batches of the next iteration, by torch's own loader."""
        source = self._source
        if source.is_chosen:
            if not self._is_restored or source.epoch != self._epoch:
                self._start = 0
        elif self._is_over or self._has_trained:
            source.epoch, self._start = self._epoch + 1, 0
        self._is_restored = self._is_restored and not self._has_trained
        self._epoch, source.is_chosen = source.epoch, False
        source.skipped = self._start * (self.batch_size or 1)
        self._given, self._is_over = self._start, False
        self._running, self._steps_before = iterator, self.steps_taken()
        iterator.loads = self._loads
        return super().__iter__()

    def count(self, iterator: EpochIterator, *, ended: bool) -> None:
        """Record that an iteration returned a batch, or has `ended`. Older iterations that still run do not
        count."""
        if iterator is not self._running:
            return
        self._given += not ended
        self._is_over = ended
        self.on_batch(self._epoch, self._given, ended)

    def state_dict(self) -> dict[str, int]:
        """Return the position of training: the epoch, and the samples that all ranks together have used of
        it. The same on every rank."""
        epoch, given = self._epoch, self._given if self._has_trained else self._start
        if self._is_over:
            epoch, given = epoch + 1, 0
        return {"epoch": epoch, "samples": given * self._round, "size": self._size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at that position, also in a running iteration.

        With another number of ranks or another micro-batch the position is rounded down to whole batches;
        with data of another size the epoch starts anew.
        """
        self._epoch = self._source.epoch = int(state["epoch"])
        given = int(state["samples"]) // self._round if state["size"] == self._size else 0
        self._start = self._given = given
        self._is_over, self._is_restored, self._running = False, True, None
        self._loads += 1
        self._source.is_chosen = False

    @property
    def _has_trained(self) -> bool:
        """Whether a step was taken since the iteration began."""
        return self._running is not None and self.steps_taken() > self._steps_before

    @property
    def _size(self) -> int:
        """Number of samples of the data; -1 for a stream."""
        return -1 if isinstance(self._source, RankPart) else len(self._source.dataset)  # type: ignore[arg-type]


class EpochIterator(Iterator[Any]):
    """One iteration of an `EpochLoader`; it begins with its first batch."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self.loads = 0
        """Number of the loader's state loads before the iteration began."""

    def __next__(self) -> Any:
        loader = self._loader
        if self._batches is None or loader.was_moved(self):
            self._batches = loader.begin(self)
        try:
            batch = next(self._batches)
        except StopIteration:
            loader.count(self, ended=True)
            raise
        loader.count(self, ended=False)
        return batch


def make_loader(
    data: Any,
    *,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> EpochLoader:
    """Return the loader for `initialize(training_data=...)`, a map-style or an iterable data set.

    Raises TypeError for other data, ValueError where a rank would not get a single batch.
    """
    source: EpochSampler | RankPart
    if isinstance(data, IterableDataset):
        # A stream from Hugging Face's split_dataset_by_node is this rank's part already.
        is_split = getattr(data, "_distributed", None) is not None
        part = {"rank": 0, "world_size": 1} if is_split else {"rank": rank, "world_size": world_size}
        source = RankPart(data, **part, drop_last=drop_last)
    else:
        _check_size(data, world_size=world_size, micro=micro_batch_size, drop_last=drop_last)
        source = EpochSampler(data, num_replicas=world_size, rank=rank, shuffle=True, drop_last=drop_last)
    return EpochLoader(
        source,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
        collate_fn=collate_fn,
        drop_last=drop_last,
    )


def _check_size(data: Any, *, world_size: int, micro: int, drop_last: bool) -> None:
    if isinstance(data, DataLoader) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(
            "training_data must be a data set, map-style (with __len__ and __getitem__) or a "
            f"torch.utils.data.IterableDataset; got {type(data).__name__}. The engine makes the loader: pass "
            "what it is to read, or leave training_data out and iterate over your own loader"
        )
    if isinstance(data, Mapping) and 0 not in data:
        raise TypeError(
            f"training_data must be indexed by numbers from 0 on; got {type(data).__name__} with the keys "
            f"{list(data)[:5]}: pass one of its values, such as training_data['train'], or a list"
        )
    size = len(data)
    needed = world_size * micro if drop_last else 1
    if size < needed:
        raise ValueError(
            f"training_data has {size} samples, but "
            + (
                f"with dataloader_drop_last one batch on each of {world_size} ranks takes {needed}; set "
                "dataloader_drop_last to false, or use a smaller train_micro_batch_size_per_gpu"
                if drop_last
                else "needs at least one"
            )
        )
