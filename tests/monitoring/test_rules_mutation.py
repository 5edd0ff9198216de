"""Every `for` and every number of the rules matters to some case: each mutation makes a case fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.monitoring.rules.hunt import RULEBOOK, survivors
from tests.monitoring.rules.mutants import Kind, mutants, seconds

EQUIVALENT = {
    "namespace_job_name_op:zerotrain_collective_duration_seconds:p99_5m (recorded): line 4: 0 -> -1": (
        "the comparison only leaves out NaN; no duration is negative"
    ),
    "ZeroTrainSpillFillingUp (warning): line 1: 0 -> 1.5": "a byte and a half free is as good as none",
}
"""Mutation -> why no series can tell the difference."""

KINDS = (Kind.FOR, Kind.NUMBER)
WRONGS = [wrong for wrong in mutants(RULEBOOK) if wrong.kind in KINDS and str(wrong) not in EQUIVALENT]


@pytest.mark.unit
def test_durations_are_read() -> None:
    assert [seconds(text) for text in ("30s", "5m", "1h30m", "1d")] == [30, 300, 5400, 86_400]


@pytest.mark.unit
@pytest.mark.parametrize("alert", sorted({rule.name for rule in RULEBOOK if rule.alerting}))
def test_every_alert_has_wrongs(alert: str) -> None:
    """A rule that the mutator cannot parse would pass unnoticed."""
    made = {wrong.kind for wrong in WRONGS if wrong.rule.name == alert}
    waits = any(rule.wait for rule in RULEBOOK if rule.name == alert)
    assert (Kind.FOR in made) == waits
    # Two alerts are true or false without a number.
    assert made or alert == "ZeroTrainSpillNotEncrypted"


@pytest.mark.tools
@pytest.mark.slow(
    cheaper="tests/monitoring/test_rules_units.py::test_alerts_fire_when_they_should_and_only_then"
)
@pytest.mark.timeout(900)  # half a minute on two idle cores
def test_every_wrong_is_noticed(promtool: Path, tmp_path: Path) -> None:
    left = survivors(promtool, tmp_path, WRONGS)
    assert not left, f"{len(left)} of {len(WRONGS)} survive:\n" + "\n".join(left)


@pytest.mark.unit
def test_equivalents_are_still_mutants() -> None:
    assert set(EQUIVALENT) <= {str(wrong) for wrong in mutants(RULEBOOK)}
