"""Losses and weights equal plain data-parallel AdamW.

The cases are every stage, 1, 2 and 4 ranks, accumulation, and checkpointing.

One rank without clipping is equal bit for bit. More ranks sum gradients in another order, so they agree
within `TOLERANCE` after three steps (weights are of order 0.1, each step moves them by up to 3e-3).
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.support.device import worlds
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import Case, Outcome, largest_difference, train_reference, train_with_engine

pytestmark = pytest.mark.ranks


TOLERANCE = 2e-5

CASES = tuple(
    Case(stage=stage, accumulation=accumulation, checkpointing=checkpointing)
    for stage, accumulation, checkpointing in product((0, 1, 2, 3), (1, 2), (None, "saved", "reentrant"))
)
VARIANTS = (
    *(Case(stage=stage, tied=True) for stage in (0, 1, 2, 3)),
    *(Case(stage=3, tied=True, checkpointing=kind) for kind in ("saved", "reentrant")),
    *(Case(stage=stage, checkpointing="whole") for stage in (2, 3)),
    Case(stage=3, extra={"overlap_comm": False}),
    Case(stage=2, extra={"overlap_comm": True}),
    Case(stage=3, extra={"stage3_prefetch_bucket_size": 0}),
    Case(stage=3, extra={"stage3_param_persistence_threshold": 4096}),
    Case(stage=3, extra={"stage3_max_reuse_distance": 1_000_000}),
)
FOUR_RANK_CASES = (
    *(Case(stage=stage, accumulation=accumulation) for stage in (0, 1, 2, 3) for accumulation in (1, 2)),
    *(Case(stage=3, tied=True, checkpointing=kind) for kind in (None, "saved", "reentrant")),
    Case(tied=True),
)
"""Cases for four ranks, and for the transport on which none of these settings depends."""


def train_all(cases: tuple[Case, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@cache
def outcomes(world_size: int, transport: str) -> dict[Case, list[Outcome]]:
    """Every case on `world_size` ranks, per rank; one set of processes for all."""
    cases = (*CASES, *VARIANTS) if world_size < 4 and transport != "gloo" else FOUR_RANK_CASES
    per_rank = run_ranks(world_size, train_all, cases)
    return {case: [outcomes[index] for outcomes in per_rank] for index, case in enumerate(cases)}


@cache
def reference_of(accumulation: int, tied: bool, world_size: int) -> Outcome:
    """Train without checkpointing, as recomputing activations must not change the result either."""
    return train_reference(Case(accumulation=accumulation, tied=tied), world_size)


@pytest.mark.parametrize(
    ("world_size", "each_transport"),
    with_slow_rows(worlds(1, 2, 4), quick=worlds(2)),
    indirect=["each_transport"],
)
def test_training_equals_plain_adamw(world_size: int, each_transport: str) -> None:
    for case, ranks in outcomes(world_size, each_transport).items():
        reference = reference_of(case.accumulation, case.tied, world_size)
        for rank, outcome in enumerate(ranks):
            where = f"{case}, rank {rank} of {world_size}"
            if world_size == 1:
                assert outcome.losses == reference.losses, where
                assert largest_difference(outcome, reference) == 0.0, where
            else:
                assert outcome.losses == pytest.approx(reference.losses, abs=TOLERANCE), where
                assert largest_difference(outcome, reference) < TOLERANCE, where
            assert outcome.norms == pytest.approx(reference.norms, rel=1e-5), where


@pytest.mark.parametrize(
    ("world_size", "each_transport"),
    with_slow_rows(worlds(2, 4), quick=worlds(2)),
    indirect=["each_transport"],
)
def test_every_stage_computes_the_same_bits(world_size: int, each_transport: str) -> None:
    """The cases have one micro-batch: stages differ in the place of data, not in one operation."""
    every = outcomes(world_size, each_transport)
    single = {case: ranks for case, ranks in every.items() if case.accumulation == 1}
    for case, ranks in single.items():
        base = next(
            other
            for other in single
            if other.stage == 0 and other.tied == case.tied and not other.checkpointing
        )
        for outcome in ranks:
            assert outcome.losses == single[base][0].losses, case
            assert largest_difference(outcome, single[base][0]) == 0.0, case
