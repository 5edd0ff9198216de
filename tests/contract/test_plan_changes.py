"""The planner's estimate of a change equals the plan of the file with the change written into it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract.test_plan_demand import LLAMA_8B, ROOMY, workload, zero
from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.contract.config.edit import edited
from zerotrain.contract.config.scaling import global_batch, with_batch
from zerotrain.contract.config.schema import BatchConfig
from zerotrain.contract.planner import Edits, Terms, Tier, Workload, demand, nearest
from zerotrain.contract.planner import proposals as searched
from zerotrain.contract.planner.changes import Change, changes

pytestmark = pytest.mark.unit


GIB = 1 << 30
BF16 = {"enabled": True}
SAMPLE = {"train_micro_batch_size_per_gpu": 1}

WRITTEN: list[dict[str, Any]] = [
    {},
    {"zero_optimization": zero(1, overlap_comm=False), "train_batch_size": 64},
    {"zero_optimization": zero(2, overlap_comm=True), "bf16": {**BF16, "store_param_remainders": False}},
    {"zero_optimization": zero(3, cpu_offload=True, stage3_prefetch_bucket_size=10)},
    {"zero_optimization": True, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
    {"optimizer": {"type": "OneBitAdam"}},
    {"optimizer": {"type": "Lamb"}, "zero_optimization": zero(2)},
    {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}, "zero_optimization": zero(3)},
]


def together(found: Sequence[Change]) -> dict[str, Any]:
    return {path: value for change in found for path, value in change.edits.items()}


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_both_faces_of_a_change_agree(written: dict[str, Any]) -> None:
    """All pairs of changes need the same, whether estimated quickly or read from the changed file."""
    document = {"bf16": BF16, "train_micro_batch_size_per_gpu": 4, **written}
    load_ = workload(LLAMA_8B, limits=ROOMY, **document)
    terms = Terms.of(load_.config)
    offered = list(changes(load_, terms))
    agreed = 0
    for pair in itertools.combinations(offered, 2):
        if pair[0].kind == pair[1].kind:
            continue
        weighed = searched._evaluate(load_, terms, pair)
        if weighed is None:
            continue
        ranks = weighed.workload.config.world_size
        file = edited(document, together(pair))
        read = demand(workload(LLAMA_8B, ranks=ranks, limits=ROOMY, **file))
        assert read.workload.config.unsupported == ()
        assert weighed.tiers == read.tiers, [change.text for change in pair]
        assert weighed.workload.config.batch == read.workload.config.batch
        agreed += 1
    assert agreed > 10


def sizes(*values: int | None) -> list[dict[str, int]]:
    """Return the three sizes of a batch, with each of them given or left out in all combinations."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rows = itertools.product(*((None, value) for value in values))
    return [{name: size for name, size in zip(names, row, strict=True) if size} for row in rows]


def resolved(written: dict[str, int], base: int | None, ranks: int) -> BatchConfig | None:
    """Return the batch that the resolver finds, from a file with all three sizes where the batch is kept;
    None if rejected.
    """
    try:
        document: dict[str, Any] = dict(written)
        if base is not None:
            document = with_batch(written, global_batch(written, world_size=base).at(ranks))
        return resolve(load(document), world_size=ranks).batch
    except ConfigError:
        return None


def reckoned(terms: Terms, ranks: int) -> BatchConfig | None:
    try:
        return terms.batch(ranks, {})
    except ConfigError:
        return None


@pytest.mark.parametrize("base", [None, 2, 4])
@pytest.mark.parametrize("written", sizes(48, 3, 4) + sizes(48, 2, 6), ids=str)
def test_the_batch_follows_the_ranks_as_the_resolver_has_it(
    written: dict[str, int], base: int | None
) -> None:
    try:
        config = resolve(load(written), world_size=base or 4)
    except ConfigError:
        return  # there is no such job
    terms = Terms.of(config, base_ranks=base)
    for ranks in (1, 2, 3, 4, 6, 8, 12, 16, 48):
        assert reckoned(terms, ranks) == resolved(written, base, ranks), ranks


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        ({}, {"bf16.enabled": True}, {"bf16": {"enabled": True}}),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": False}},
            {"zero_optimization.stage": 3},
            {"zero_optimization": {"stage": 3, "overlap_comm": False}},
        ),
        (
            {"stage3_prefetch_bucket_size": 5, "zero_optimization": {"stage3_max_reuse_distance": 6}},
            {"zero_optimization.prefetch_bucket_size": 0, "zero_optimization.max_reuse_distance": 0},
            {"zero_optimization": {"prefetch_bucket_size": 0, "max_reuse_distance": 0}},
        ),
        (
            {"bfloat16": {"enabled": True, "store_param_remainders": False}},
            {"bf16.store_param_remainders": True},
            {"bfloat16": {"enabled": True}, "bf16": {"store_param_remainders": True}},
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_param": None}},
            {
                "zero_optimization.offload_optimizer.device": "nvme",
                "zero_optimization.offload_param.device": "cpu",
            },
            {
                "zero_optimization": {
                    "offload_optimizer": {"device": "nvme"},
                    "offload_param": {"device": "cpu"},
                }
            },
        ),
        ({"zero_optimization": True}, {"zero_optimization.stage": 2}, {"zero_optimization": {"stage": 2}}),
        (
            {"zero_optimization": True},
            {"zero_optimization.overlap_comm": True},
            {"zero_optimization": {"stage": 1, "overlap_comm": True}},
        ),
        (
            {"activation_checkpointing": {"profile": True}},
            {"activation_checkpointing": {}},
            {"activation_checkpointing": {"profile": True}},
        ),
        ({"_note": 1}, {"activation_checkpointing": {}}, {"_note": 1, "activation_checkpointing": {}}),
    ],
)
def test_an_edit(before: dict[str, Any], edits: dict[str, Any], after: dict[str, Any]) -> None:
    """An edit removes the key's other names; all else stays, and the input is unchanged."""
    untouched = repr(before)
    assert edited(before, edits) == after
    assert repr(before) == untouched
    resolve(load(after), world_size=2)


def test_what_is_refused_is_not_asked_for_again() -> None:
    """A reader that accepts no drive is asked for few files before a proposal without one is found."""
    limits = {Tier.GPU: 20 * GIB, Tier.HOST: 60 * GIB}
    document: dict[str, Any] = {"bf16": BF16, **SAMPLE, "zero_optimization": zero(3)}
    tight = workload(LLAMA_8B, limits=limits, **document)
    asked: list[Edits] = []

    def reader(edits: Edits, workers: int) -> Workload | None:
        asked.append(edits)
        if "nvme" in edits.values():
            return None
        return workload(LLAMA_8B, ranks=8 * workers, limits=limits, **edited(document, edits))

    free = nearest(tight)
    assert free is not None
    assert '"offload_optimizer": {"device": "nvme"}' in free.changes
    found = nearest(tight, Terms.of(tight.config, reader=reader))
    assert found is not None
    assert found.changes == (
        '"bf16": {"store_param_remainders": true}',
        '"activation_checkpointing": {}',
        "spec.workers: 2",
    )
    assert len(asked) == 4  # the pair, each of the two alone, and the accepted proposal


def test_readings_are_bounded() -> None:
    """The search ends although the reader rejects everything."""
    asked: list[Edits] = []

    def reader(edits: Edits, workers: int) -> None:
        asked.append(edits)

    tight = workload(LLAMA_8B, limits={Tier.GPU: 40 * GIB}, zero_optimization=zero(0))
    assert nearest(tight, Terms.of(tight.config)) is not None
    assert nearest(tight, Terms.of(tight.config, reader=reader)) is None
    assert 1 <= len(asked) <= searched.MAX_READINGS
