"""A checkpoint of any tier, encoding and number of ranks loads into every other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import offloaded_engines
from tests.support.offloaded_engines import TIERS, Place, file_digests
from tests.support.ranks import run_ranks
from zerotrain.runtime.checkpoint.compare import Side, differences

pytestmark = pytest.mark.ranks


ENCODINGS = (False, True)
PLACES = [Place(tier=tier, remainders=remainders) for remainders in ENCODINGS for tier in TIERS]
RANKS = (1, 2)


@dataclass(frozen=True)
class Saved:
    """Checkpoints and results of the uninterrupted runs, by number of ranks."""

    root: Path
    found: dict[int, list[dict[str, Any]]]

    def folder(self, ranks: int, place: Place) -> Path:
        return self.root / str(ranks) / place.name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    root = tmp_path_factory.mktemp("tiers")
    found = {
        ranks: run_ranks(ranks, offloaded_engines.save_all, str(root / str(ranks)), PLACES) for ranks in RANKS
    }
    return Saved(root, found)


@pytest.mark.parametrize("remainders", ENCODINGS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_tier_writes_the_same_bytes(saved: Saved, ranks: int, remainders: bool) -> None:
    resident, *others = [Place(tier=tier, remainders=remainders) for tier in TIERS]
    expected = file_digests(saved.folder(ranks, resident) / "x")
    assert len(expected) == ranks
    for place in others:
        assert file_digests(saved.folder(ranks, place) / "x") == expected
        for rank in saved.found[ranks]:
            assert rank[place.name] == rank[resident.name]


def test_the_bytes_can_differ(saved: Saved) -> None:
    """The values that are compared above differ between runs."""
    one, two = [saved.found[ranks][0][PLACES[0].name] for ranks in RANKS]
    assert one["masters"] != two["masters"]
    assert any(one["after"][name] != digest for name, digest in one["masters"].items())


@pytest.mark.parametrize("before", RANKS)
@pytest.mark.parametrize("after", RANKS)
def test_every_tier_loads_every_other(saved: Saved, tmp_path: Path, before: int, after: int) -> None:
    """Equal encodings train on without a difference; across encodings the masters are equal."""
    loads = []
    for remainders in ENCODINGS:
        for number, place in enumerate(PLACES):
            source = Place(tier=TIERS[(number + 1) % len(TIERS)], remainders=remainders)
            loads.append((remainders, source, place))
    asked = [
        (str(saved.folder(before, source)), place, place.remainders is remainders)
        for remainders, source, place in loads
    ]
    answers = run_ranks(after, offloaded_engines.load_all, str(tmp_path), asked)
    for rank, rows in enumerate(answers):
        first: dict[object, dict[str, Any]] = {}
        for (remainders, source, place), row in zip(loads, rows, strict=True):
            if before == after:
                straight = saved.found[before][rank][source.name]
                assert row["masters"] == straight["masters"]
                if place.remainders is remainders:
                    assert (row["losses"], row["after"]) == (straight["losses"], straight["after"])
            # With another number of ranks sums are rounded differently, but on every tier alike.
            assert row["masters"] == first.setdefault((remainders, "masters"), row)["masters"]
            assert row["after"] == first.setdefault((remainders, place.remainders), row)["after"]


def test_other_stages_and_offloaded_weights(saved: Saved, tmp_path: Path) -> None:
    """States or weights are replicated: every element that one stage saved is restored at another."""
    source = Place(tier="nvme", remainders=True)
    places = [
        Place(tier="nvme", stage=0),
        Place(tier="cpu", stage=0, remainders=True),
        Place(tier="cpu", stage=1),
        Place(tier="nvme", stage=2, remainders=True),
        Place(tier="nvme", param_tier="nvme", remainders=True),
        Place(tier="none", param_tier="nvme"),
    ]
    folder = saved.folder(2, source)
    asked = [(str(folder), place, str(tmp_path / place.name)) for place in places]
    one, other = run_ranks(2, offloaded_engines.load_and_save_all, str(tmp_path), asked)
    assert one == other
    for place in places:
        sides = Side(folder / "x"), Side(tmp_path / place.name / "x")
        try:
            rows = list(differences(*sides))
        finally:
            for side in sides:
                side.close()
        assert len(rows) > 10
        assert [row for row in rows if not row.is_equal] == []
