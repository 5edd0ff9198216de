"""The three batch sizes that follow from any of them, compared with a search over all sizes."""

from __future__ import annotations

import itertools

import pytest

from zerotrain.contract.config import ConfigError, load, resolve

pytestmark = pytest.mark.unit


NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
Sizes = tuple[int | None, int | None, int | None]


def sizes_of(given: Sizes, ranks: int) -> tuple[int, int, int]:
    values = {name: size for name, size in zip(NAMES, given, strict=True) if size is not None}
    batch = resolve(load(values), world_size=ranks).batch
    return batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps


def search(given: Sizes, ranks: int) -> tuple[int, int, int] | None:
    """Return the first triple up to 64 that multiplies and agrees; open sizes prefer accumulation 1, micro
    batch 1.
    """
    train, micro, accumulation = given
    for each_accumulation in range(1, 65):
        for each_micro in range(1, 65):
            triple = (each_micro * each_accumulation * ranks, each_micro, each_accumulation)
            if all(want is None or want == have for want, have in zip(given, triple, strict=True)):
                return triple
            if train is None and micro is None and each_micro > 1:
                break
        if accumulation is None and (train is None or micro is None):
            return None
    return None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_combination_agrees_with_the_search(ranks: int) -> None:
    options = (None, 1, 2, 6)
    for given in itertools.product((None, 1, 6, 12), options, options):
        expected = search(given, ranks)
        if expected is None:
            with pytest.raises(ConfigError, match="train_batch_size"):
                sizes_of(given, ranks)
        else:
            assert sizes_of(given, ranks) == expected, (given, ranks)


def test_sizes_that_do_not_divide_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"must be a multiple of .* = 8; got 65\. Take 64 or 72"):
        sizes_of((65, None, None), 8)
    with pytest.raises(ConfigError, match="Take 8"):
        sizes_of((3, None, None), 8)
    with pytest.raises(ConfigError, match=r"4 x 2 x 8 = 64; got 65\. Take 64"):
        sizes_of((65, 4, 2), 8)


@pytest.mark.parametrize("wrong", [0, -1, 0.5, "many", True, [1], {}])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_whole_and_positive(name: str, wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load({name: wrong}), world_size=1)
    assert caught.value.path == name


def test_no_ranks() -> None:
    with pytest.raises(ConfigError, match="world_size"):
        resolve(load({}), world_size=0)


def test_no_size_at_all_is_reported() -> None:
    config = resolve(load({"gradient_accumulation_steps": 2}), world_size=4)
    assert config.batch.train_batch_size == 8
    assert any(notice.path == "train_micro_batch_size_per_gpu" for notice in config.notices)
