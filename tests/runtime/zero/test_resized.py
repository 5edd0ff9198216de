"""Gathered weights on a GPU, whose memory is freed by resizing a storage to nothing.

torch refuses views of such a storage, and its address changes. The same on a CPU changes no bit.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.device import DEVICE
from tests.support.ranks import run_ranks, use_transport
from tests.support.training import Case, Outcome, largest_difference, train_with_engine
from zerotrain.runtime.zero import buffer

pytestmark = pytest.mark.ranks


CASES = (
    *(
        Case(stage=3, dtype=dtype, accumulation=2, checkpointing=checkpointing, tied=tied)
        for dtype, checkpointing, tied in product(
            ("fp32", "bf16"), (None, "saved", "reentrant", "whole"), (False, True)
        )
    ),
    Case(stage=3, extra={"overlap_comm": False}),
    Case(stage=3, extra={"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 4096}),
    Case(stage=3, extra={"stage3_max_reuse_distance": 1_000_000}),
    *(Case(stage=stage, clip=0.5) for stage in (0, 1, 2)),
)


def train_all(*, resizes: bool) -> list[Outcome]:
    if resizes:
        buffer.has_pages = lambda device: False
    return [train_with_engine(case) for case in CASES]


def train_resized() -> list[Outcome]:
    return train_all(resizes=True)


def train_paged() -> list[Outcome]:
    return train_all(resizes=False)


def test_resized_storages_change_no_bit() -> None:
    with use_transport("nccl" if DEVICE == "cuda" else "gloo"):  # shared memory has no storages to resize
        found, wanted = run_ranks(2, train_resized)[1], run_ranks(2, train_paged)[1]
    for case, one, other in zip(CASES, found, wanted, strict=True):
        assert one.losses == other.losses, case
        assert largest_difference(one, other) == 0.0, case
