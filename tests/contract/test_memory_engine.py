"""The formulas against the engine: what it counts between steps is what they say, and its peak within 1%."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.memory_runs import measured_and_planned
from tests.support.ranks import run_ranks


def config(stage: int, *, bf16: bool, overlap: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlap,
            # Above the final norm, below everything else: one unit stays whole.
            "stage3_param_persistence_threshold": 1_000,
        },
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bytes_of_every_stage(world_size: int) -> None:
    precisions = ((True, True), (True, False), (False, True))
    cases = [(stage, *precision) for stage, precision in itertools.product(range(4), precisions)]
    configs = [config(stage, bf16=bf16, overlap=overlap) for stage, bf16, overlap in cases]
    for found in run_ranks(world_size, measured_and_planned, configs):
        for case, bytes_of in zip(cases, found, strict=True):
            kept, planned_kept = bytes_of["kept"]
            peak, planned_peak = bytes_of["peak"]
            assert kept == planned_kept, case
            assert peak == pytest.approx(planned_peak, rel=0.01), case
