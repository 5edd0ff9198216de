"""A resize keeps the global batch: accumulation follows the number of ranks, or an error gives the
numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.contract.config.scaling import global_batch, with_batch

pytestmark = pytest.mark.unit


TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def at(config: dict[str, Any], ranks: int, *, own: int = 4) -> tuple[int, int, int]:
    """Return the three sizes on `ranks` ranks of a job whose own number is `own`, as every reader gets
    them.
    """
    sizes = global_batch(config, world_size=own).at(ranks)
    batch = resolve(load(with_batch(config, sizes)), world_size=ranks).batch
    assert batch == sizes
    return batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        ({MICRO: 2}, 4, (8, 2, 1)),
        ({MICRO: 2}, 2, (8, 2, 2)),
        ({MICRO: 2}, 1, (8, 2, 4)),
        ({MICRO: 2, STEPS: 3}, 6, (24, 2, 2)),
        ({MICRO: 2, STEPS: 3}, 12, (24, 2, 1)),
        ({TRAIN: 16, MICRO: 2}, 8, (16, 2, 1)),
        ({TRAIN: 16, MICRO: 2, STEPS: 2}, 2, (16, 2, 4)),
        ({}, 2, (4, 1, 2)),
        # A micro batch that the file does not name may become smaller, never larger.
        ({TRAIN: 8}, 8, (8, 1, 1)),
        ({TRAIN: 8}, 2, (8, 2, 2)),
        ({TRAIN: 24, STEPS: 2}, 8, (24, 3, 1)),
        ({TRAIN: 24, STEPS: 2}, 3, (24, 2, 4)),
        ({TRAIN: 16, MICRO: "auto"}, 8, (16, 2, 1)),
    ],
)
def test_accumulation_follows_the_ranks(
    config: dict[str, Any], ranks: int, expected: tuple[int, int, int]
) -> None:
    assert at(config, ranks) == expected


def test_a_size_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        at({MICRO: 2}, 3)
    assert caught.value.path == TRAIN
    assert "train_micro_batch_size_per_gpu 2 x 3 ranks = 6" in str(caught.value)
    assert "got 8" in str(caught.value)
    assert "1, 2, 4." in caught.value.way_out
    with pytest.raises(ConfigError, match=r"multiple of 16 ranks = 16.*got 8\. .* 1, 2, 4, 8\."):
        at({TRAIN: 8}, 16)


def test_the_sizes_that_fit_agree_with_trying_all() -> None:
    batch = global_batch({MICRO: 3, STEPS: 8}, world_size=12)
    tried = []
    for workers in range(1, 60):
        try:
            batch.at(workers * 2)
        except ConfigError:
            continue
        tried.append(workers)
    assert (
        batch.workers(ranks_per_worker=2, lowest=1, highest=59)
        == tuple(tried)
        == (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    )
