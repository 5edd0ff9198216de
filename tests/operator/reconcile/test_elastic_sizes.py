"""Sizes of an elastic job: settings that depend on the number of ranks are checked for each size, too."""

from __future__ import annotations

import pytest

from tests.support.jobs import make_job
from zerotrain.operator.api.configuration import largest_size, refusal_of_size

pytestmark = pytest.mark.unit


IN_FOURS = make_job(
    {
        "spec.workers": 4,
        "spec.ranksPerWorker": 1,
        "spec.elastic": {"minWorkers": 1, "maxWorkers": 8},
        "spec.config": {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4},
        },
    }
).spec


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_a_size_whose_ranks_form_no_groups_is_refused(workers: int) -> None:
    refusal = refusal_of_size(IN_FOURS, 4, workers)
    assert refusal is not None
    assert refusal.startswith(f"{workers} workers x 1 ranks: zero_optimization.zero_hpz_partition_size: ")
    assert f"must divide the {workers} ranks of the job; got 4." in refusal


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_a_size_whose_ranks_do_is_not(workers: int) -> None:
    """A single rank shares with no other, so it is not checked."""
    assert refusal_of_size(IN_FOURS, 4, workers) is None


@pytest.mark.parametrize(("at_most", "largest"), [(8, 8), (7, 4), (4, 4), (3, 1)])
def test_the_operator_passes_over_such_sizes(at_most: int, largest: int) -> None:
    assert largest_size(IN_FOURS, 4, at_most=at_most, fits=lambda _: True) == largest
