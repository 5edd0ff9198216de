"""Exit code of the operator's benchmark: a quick run is held to counts, a full one to times as well; and the
reading of times from histograms.
"""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.bench_operator import Row, exit_code
from tests.benchmarks.bench_operator_cluster import latency_quantile

pytestmark = pytest.mark.unit


REQUESTS = """\
d_bucket{le="1.0",verb="GET"} 100.0
d_bucket{le="2.0",verb="GET"} 100.0
d_bucket{le="+Inf",verb="GET"} 100.0
d_bucket{le="1.0",verb="POST"} 50.0
d_bucket{le="2.0",verb="POST"} 100.0
d_bucket{le="+Inf",verb="POST"} 100.0
"""


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
def test_the_exit_code_shows_what_was_missed(met: bool | None, counted: bool, quick: bool, code: int) -> None:
    assert exit_code([row(True, counted=True), row(met, counted=counted)], quick=quick) == code


def test_a_quantile_is_that_of_the_series_asked_for() -> None:
    assert latency_quantile(REQUESTS, "d", 0.9, verb="POST") == pytest.approx(1.8)
    assert latency_quantile(REQUESTS, "d", 0.9, verb="GET") == pytest.approx(0.9)
    assert math.isnan(latency_quantile(REQUESTS, "d", 0.9, verb="PUT"))
