"""The parts cover all unit tests, none twice, and each process collects only its own part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.parts import part_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent
FILES = [file for file in ROOT.glob("**/test_*.py") if not tiers.is_left_out(file, "unit and not slow")]


@pytest.mark.parametrize("number", [1, 2, 3, 16])
def test_every_file_is_in_one_part(number: int) -> None:
    found = [file for part in range(number) for file in part_of(FILES, part, number)]
    assert sorted(found) == sorted(FILES)


def test_two_parts_are_alike_in_size_and_one_has_most_of_torch() -> None:
    first, second = (sum(file.stat().st_size for file in part_of(FILES, part, 2)) for part in range(2))
    assert 0.9 < first / second < 1.1
    runtime = {file for file in FILES if file.parent.name == "runtime"}
    assert runtime <= part_of(FILES, 0, 2)
