"""Our scripts, each written as its library's users write it, equal DDP in every tier of the engine."""

from __future__ import annotations

import pytest

from tests.support.hf_cases import OWN_CASES
from tests.support.hf_parity import Bench, rows, tiers_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("huggingface"))


@pytest.mark.parametrize("name", rows(OWN_CASES, quick=["trainer", "accelerate"]))
def test_a_script_trains_as_under_ddp(bench: Bench, name: str) -> None:
    bench.compare(name, OWN_CASES[name], tiers_of(name, OWN_CASES[name]))
