"""Offloaded weights change no bit: losses, norms, states and weights are equal.

The reference is an engine that keeps its shards on the device, with the same encoding and the same kernel.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.offloaded_params import Where, run_all
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import Case

pytestmark = pytest.mark.ranks


BASE = Case(stage=3, dtype="bf16", clip=0.3, torch_adam=False, steps=4)
SPILLED = Where(params="nvme", states="nvme", remainders=True)

JOBS = [
    # (case, where, frozen parts); the first place of a (case, encoding, frozen) is the reference
    (BASE, Where(), False),
    (BASE, Where(params="cpu"), False),
    (BASE, Where(params="nvme"), False),
    (BASE, Where(params="nvme", states="cpu"), False),
    (BASE, Where(params="nvme", max_in_cpu=10_000), False),
    (BASE, Where(remainders=True), False),
    (BASE, SPILLED, False),
    (BASE, replace(SPILLED, just_in_time=True), False),
    (BASE, replace(SPILLED, just_in_time=False), False),
    (replace(BASE, tied=True, accumulation=2), Where(remainders=True), True),
    (replace(BASE, tied=True, accumulation=2), SPILLED, True),
    (replace(BASE, tied=True, accumulation=2), Where(params="nvme", states="cpu", remainders=True), True),
    (replace(BASE, checkpointing="reentrant"), Where(), False),
    (replace(BASE, checkpointing="reentrant"), Where(params="nvme", states="nvme"), False),
    (replace(BASE, checkpointing="saved", dtype="fp32"), Where(), True),
    (replace(BASE, checkpointing="saved", dtype="fp32"), Where(params="nvme", states="nvme"), True),
]


FOUR_RANK_JOBS = [JOBS[0], JOBS[3], JOBS[5], JOBS[7], JOBS[9], JOBS[10]]
"""One of each kind, for ranks that outnumber the cores."""


@pytest.mark.parametrize(
    ("ranks", "jobs"), with_slow_rows([(1, JOBS), (2, JOBS), (4, FOUR_RANK_JOBS)], quick=[(2, JOBS)])
)
def test_offloaded_weights_change_no_bit(
    ranks: int, jobs: list[tuple[Case, Where, bool]], tmp_path: Path
) -> None:
    for rank, trained in enumerate(run_ranks(ranks, run_all, jobs, str(tmp_path))):
        references: dict[object, object] = {}
        for (case, where, frozen), found in zip(jobs, trained, strict=True):
            expected = references.setdefault((case, where.remainders, frozen), found)
            assert found == expected, (rank, case, where)
        assert 2 * len(references) <= len(jobs)
    assert list(tmp_path.iterdir()) == []
