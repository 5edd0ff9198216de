"""The order of samples: a permutation per epoch, the same for every number of ranks, resumable anywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from zerotrain.contract.config import BatchConfig
from zerotrain.runtime.data import ArrayCorpus, Shape, TokenLoader
from zerotrain.runtime.data.order import Permutation, SampleOrder

pytestmark = pytest.mark.unit


CONTEXT = 4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_every_window_once(size: int) -> None:
    for key in (b"a", b"b"):
        assert sorted(map(Permutation(size=size, key=key), range(size))) == list(range(size))


def test_order_is_shuffled_and_differs_by_seed_and_epoch() -> None:
    size = 1000
    first = [SampleOrder(num_windows=size, seed=1).window(i) for i in range(size)]
    second_epoch = [SampleOrder(num_windows=size, seed=1).window(size + i) for i in range(size)]
    other_seed = [SampleOrder(num_windows=size, seed=2).window(i) for i in range(size)]
    assert sorted(first) == sorted(second_epoch) == list(range(size))
    for a, b in ((first, second_epoch), (first, other_seed), (first, list(range(size)))):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 20  # chance gives about one
    assert sum(abs(x - y) == 1 for x, y in pairwise(first)) < 20


def loaders(world_size: int, gas: int, micro: int, corpus: ArrayCorpus) -> list[TokenLoader]:
    batch = BatchConfig(
        train_batch_size=world_size * gas * micro, micro_batch_size=micro, gradient_accumulation_steps=gas
    )
    return [
        TokenLoader(
            corpus,
            Shape(rank=rank, world_size=world_size, batch=batch, context=CONTEXT),
            seed=7,
            vocabulary=None,
        )
        for rank in range(world_size)
    ]


def corpus_of(num_tokens: int) -> ArrayCorpus:
    return ArrayCorpus(np.arange(num_tokens, dtype=np.int64), fingerprint=("test", num_tokens))


def step_rows(ranks: list[TokenLoader]) -> list[tuple[int, ...]]:
    return sorted(tuple(row.tolist()) for loader in ranks for batch in loader.step_batches() for row in batch)


def test_a_step_sees_the_same_samples_at_any_number_of_ranks() -> None:
    corpus = corpus_of(8 * 7 * CONTEXT + 1)  # 7 global batches of 8 an epoch
    reference = loaders(1, 1, 8, corpus)
    expected = [step_rows(reference) for _ in range(9)]  # into the second epoch
    assert sorted(row for rows in expected[:7] for row in rows) == [
        tuple(range(i * CONTEXT, (i + 1) * CONTEXT + 1)) for i in range(56)
    ]
    for world_size, gas, micro in ((2, 1, 4), (4, 2, 1), (1, 8, 1), (8, 1, 1)):
        ranks = loaders(world_size, gas, micro, corpus)
        assert [step_rows(ranks) for _ in range(9)] == expected


def test_position_carries_over_to_another_number_of_ranks() -> None:
    corpus = corpus_of(500)
    uninterrupted = loaders(2, 1, 4, corpus)
    expected = [step_rows(uninterrupted) for _ in range(6)]
    first = loaders(2, 1, 4, corpus)
    got = [step_rows(first) for _ in range(2)]
    second = loaders(4, 2, 1, corpus)
    for loader in second:
        assert loader.restore(first[0].state()) == ()
    got += [step_rows(second) for _ in range(2)]
    third = loaders(1, 2, 4, corpus)
    assert third[0].restore(second[3].state()) == ()
    got += [step_rows(third) for _ in range(2)]
    assert got == expected


def test_other_data_is_reported_on_resume() -> None:
    loader = loaders(1, 1, 2, corpus_of(500))[0]
    (difference,) = loader.restore(loaders(1, 1, 2, corpus_of(501))[0].state())
    assert difference.startswith("fingerprint was")


def test_text_slices_equal_the_joined_files(tmp_path: Path) -> None:
    from zerotrain.runtime.data import open_corpus

    (tmp_path / "b").mkdir()
    contents = {"a.txt": b"hello", "b/c.py": b"x", "b/d.md": bytes(range(1, 250)), "z": b"end"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    corpus = open_corpus(str(tmp_path))
    joined = b"".join(contents[name] + b"\0" for name in sorted(contents))
    assert corpus.num_tokens == len(joined)
    for start in range(0, len(joined), 3):
        for length in (1, 2, 7, 100):
            if start + length <= len(joined):
                assert bytes(corpus.read(start, length).astype(np.uint8)) == joined[start : start + length]
