"""What the operator's benchmark exits with: a quick run is held to counts, a full one to times as well."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_operator import Row, exit_code


def row(met: bool | None, *, counted: bool) -> Row:
    return Row(what="x", measured="1", target="<= 1", met=met, counted=counted)


@pytest.mark.parametrize(
    ("met", "counted", "quick", "code"),
    [
        (True, True, True, 0),
        (None, False, False, 0),
        (False, False, False, 1),
        (False, True, False, 1),
        (False, False, True, 0),
        (False, True, True, 1),
    ],
)
def test_what_was_missed_is_told_by_the_exit_code(
    met: bool | None, counted: bool, quick: bool, code: int
) -> None:
    assert exit_code([row(True, counted=True), row(met, counted=counted)], quick=quick) == code
