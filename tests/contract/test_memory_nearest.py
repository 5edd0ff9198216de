"""The engine proposes more ranks only where they can share the number of samples in the file."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.memory import UnitSize
from zerotrain.contract.memory.inputs import padded_numel
from zerotrain.contract.memory.nearest import Hardware, Needs, Proposal, nearest, needs_of

pytestmark = pytest.mark.unit


HOST = Hardware(on_host=True)
MICRO, TRAIN, STEPS = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
RANKS = 4
AT_ONCE = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def file(**batch: Any) -> dict[str, Any]:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    return {"bf16": {"enabled": True}, "zero_optimization": zero, **batch}


def units(ranks: int) -> list[UnitSize]:
    sizes = (1 << 20, 1 << 18, 1 << 18)
    return [
        UnitSize(name=f"u{index}", numel=size, padded_numel=padded_numel(size, ranks))
        for index, size in enumerate(sizes)
    ]


def capacity_for(config: dict[str, Any], ranks: int) -> Needs:
    """Return the memory that one of `ranks` ranks needs: enough for that number, too little for half of
    it.
    """
    free = {key: value for key, value in config.items() if key not in (MICRO, TRAIN, STEPS)}
    needs = needs_of(resolve(load(free), world_size=ranks), units(ranks), HOST)
    return Needs(host=needs.host, disk=0)


def proposed(config: dict[str, Any], *, fitting_ranks: int) -> tuple[EngineConfig, Proposal | None]:
    read = resolve(load(config), world_size=RANKS)
    capacity = capacity_for(config, fitting_ranks)
    assert not needs_of(read, units(RANKS), HOST).within(capacity)
    return read, nearest(read, units(RANKS), capacity, HOST, has_folder=True)


def done_by_hand(config: dict[str, Any], change: str) -> tuple[dict[str, Any], int]:
    """Return the file and the number of ranks of a user who follows the proposal's words."""
    found = re.fullmatch(r"(\d+) ranks, as many per worker as now(?:, with (.*))?", change)
    assert found is not None, change
    return {**config, **json.loads(f"{{{found[2] or ''}}}")}, int(found[1])


BATCHES: list[tuple[dict[str, Any], str | None]] = [
    ({}, "8 ranks, as many per worker as now"),
    ({MICRO: 2}, "8 ranks, as many per worker as now"),
    ({MICRO: 2, STEPS: 3}, "8 ranks, as many per worker as now"),
    ({TRAIN: 16}, "8 ranks, as many per worker as now"),
    ({TRAIN: 16, MICRO: 2}, "8 ranks, as many per worker as now"),
    ({TRAIN: 16, STEPS: 2}, "8 ranks, as many per worker as now"),
    ({TRAIN: 16, STEPS: 4}, f'8 ranks, as many per worker as now, with "{STEPS}": 2'),
    ({TRAIN: 16, MICRO: 1, STEPS: 4}, f'8 ranks, as many per worker as now, with "{STEPS}": 2'),
    ({TRAIN: 4}, None),
    ({TRAIN: 12}, None),
    ({TRAIN: 12, MICRO: 3}, None),
    ({TRAIN: 12, STEPS: 3}, None),
    ({TRAIN: 12, MICRO: 3, STEPS: 1}, None),
    ({TRAIN: "auto", MICRO: "auto", STEPS: "auto"}, "8 ranks, as many per worker as now"),
]


@pytest.mark.parametrize(("batch", "words"), BATCHES, ids=str)
def test_twice_the_ranks(batch: dict[str, Any], words: str | None) -> None:
    given = file(**batch)
    read, found = proposed(given, fitting_ranks=8)
    assert (None if found is None else found.changes) == (None if words is None else (words,))
    if found is None:
        with pytest.raises(ConfigError):
            resolve(load(given), world_size=8)
        return
    changed, ranks = done_by_hand(given, found.changes[0])
    after = resolve(load(changed), world_size=ranks)
    assert needs_of(after, units(ranks), HOST) == found.needs
    assert after.batch.micro_batch_size <= read.batch.micro_batch_size
    if TRAIN in batch and batch[TRAIN] != "auto":
        assert after.batch.train_batch_size == batch[TRAIN]


SIZES: list[int | None] = [None, 1, 2, 3, 4]


@pytest.mark.parametrize("train", [None, 8, 12, 16, 24, 48, 64, 96])
@pytest.mark.parametrize("ranks_that_fit", [8, 16, 32])
def test_so_are_all_others(train: int | None, ranks_that_fit: int) -> None:
    """All batches of small numbers, wherever the next sufficient number of ranks is."""
    num_proposals = 0
    for micro, steps in itertools.product(SIZES, SIZES):
        given = {TRAIN: train, MICRO: micro, STEPS: steps}
        config = file(**{key: value for key, value in given.items() if value is not None})
        try:
            resolve(load(config), world_size=RANKS)
        except ConfigError:
            continue
        _, found = proposed(config, fitting_ranks=ranks_that_fit)
        if found is not None:
            changed, ranks = done_by_hand(config, found.changes[0])
            after = needs_of(resolve(load(changed), world_size=ranks), units(ranks), HOST)
            assert after.within(capacity_for(config, ranks_that_fit))
            num_proposals += 1
    # More ranks can share a batch of their multiples, and any batch whose size is not given.
    assert (num_proposals > 0) == (train is None or train % ranks_that_fit == 0)


@pytest.mark.parametrize(("group", "words"), [(4, '"zero_optimization": {"stage": 3}'), (3, None)])
def test_stage_3_only_where_the_ranks_form_groups(group: int, words: str | None) -> None:
    """The size of the hpZ groups is checked against the ranks only from stage 3 on."""
    zero = {"stage": 2, "zero_hpz_partition_size": group, "overlap_comm": True, **AT_ONCE}
    read = resolve(load({TRAIN: RANKS, "zero_optimization": zero}), world_size=RANKS)
    layers = units(RANKS)[1:] * 20
    needs = needs_of(read, layers, Hardware())
    assert needs.accelerator is not None
    capacity = replace(needs, accelerator=needs.accelerator - 1)
    found = nearest(read, layers, capacity, Hardware(), has_folder=True)
    assert (None if found is None else found.changes) == (None if words is None else (words,))
