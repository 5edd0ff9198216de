"""Every pair of stages, every optimizer, N -> M -> N ranks: the same bits of every state come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import resized_engines
from tests.support.ranks import run_ranks
from tests.support.resized_engines import OPTIMIZERS, STAGES
from zerotrain.runtime.checkpoint.compare import Difference, Side, differences
from zerotrain.runtime.checkpoint.inspect import read_manifest

pytestmark = pytest.mark.ranks


N, M = 3, 2

PAIRS = [
    *[("AdamW", saved, loaded) for saved in STAGES for loaded in STAGES],
    *[(name, saved, 3 - saved) for name in OPTIMIZERS[1:-1] for saved in STAGES],
    *[("OneBitAdam", saved, 1 - saved) for saved in (0, 1)],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return folders saved by N ranks (`first`), by M (`middle`), and by N at the first stage (`last`).

    `middle` and `last` are each loaded from the one before.
    """
    root = tmp_path_factory.mktemp("stages")
    first, middle, last = root / "first", root / "middle", root / "last"
    saved = sorted({(name, stage) for name, stage, _ in PAIRS})
    run_ranks(N, resized_engines.save_all, str(first), saved)
    there = [(n, b, str(first / f"{n}-{a}"), str(middle / f"{n}-{a}-{b}")) for n, a, b in PAIRS]
    back = [(n, a, str(middle / f"{n}-{a}-{b}"), str(last / f"{n}-{a}-{b}")) for n, a, b in PAIRS]
    run_ranks(M, resized_engines.load_and_save_all, there)
    run_ranks(N, resized_engines.load_and_save_all, back)
    return root


def differing(left: Path, right: Path) -> list[Difference]:
    sides = Side(left / "x"), Side(right / "x")
    try:
        return [row for row in differences(*sides) if not row.is_equal]
    finally:
        for side in sides:
            side.close()


@pytest.mark.parametrize(("optimizer", "saved", "loaded"), PAIRS)
def test_the_same_bits_come_back(folder: Path, optimizer: str, saved: int, loaded: int) -> None:
    first = folder / "first" / f"{optimizer}-{saved}"
    pair = f"{optimizer}-{saved}-{loaded}"
    middle, last = folder / "middle" / pair, folder / "last" / pair
    # Each rank's own compression error has no meaning at another number of ranks: DeepSpeed drops it too.
    there = [row for row in differing(first, middle) if not row.kind.startswith("worker_error")]
    back = [row for row in differing(first, last) if not row.kind.startswith("worker_error")]
    manifests = [read_manifest(path / "x") for path in (first, middle, last)]
    assert manifests[0].scalars == manifests[1].scalars == manifests[2].scalars
    assert there == []
    assert back == []


def test_the_comparison_sees_a_difference(folder: Path) -> None:
    names = {row.kind for row in differing(folder / "first" / "AdamW-0", folder / "first" / "Lion-0")}
    assert {"master", "exp_avg"} <= names
