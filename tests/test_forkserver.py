"""Ranks are forked with what most of them use imported, also in a process that runs tests of the trainer."""

from __future__ import annotations

import sys

import pytest

from tests.support import trainer_runs as trainer_runs
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

IMPORTED = [
    "tests.support.training",
    "torch._dynamo",
    "torch.distributed.tensor",
    "zerotrain.runtime.checkpoint.writer",
    "zerotrain.runtime.train.main",
]


def those_imported() -> list[str]:
    return [name for name in IMPORTED if name in sys.modules]


def test_what_ranks_share_is_imported_once() -> None:
    assert run_ranks(1, those_imported) == [IMPORTED]
