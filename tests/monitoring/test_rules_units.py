"""Unit tests of the rules on series, by promtool: each alert fires when it should, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.monitoring.rules import cases_pace, cases_progress, cases_regression, cases_state
from tests.monitoring.rules.cases_values import RECORDED
from tests.monitoring.rules.model import Case, by_alert
from tests.monitoring.rules.rulebook import RULES, closure, dependents, load
from tests.monitoring.rules.runner import Trial, outcomes
from tests.support.tools import run_program

CASES = by_alert((*cases_progress.CASES, *cases_pace.CASES, *cases_regression.CASES, *cases_state.CASES))
RULEBOOK = load()
ALERTS = tuple(dict.fromkeys(rule.name for rule in RULEBOOK if rule.alerting))


@pytest.mark.tools
def test_promtool_accepts_the_rule_files(promtool: Path) -> None:
    run_program([promtool, "check", "rules", "--lint=all", "--lint-fatal", *sorted(RULES.glob("*.yaml"))])


@pytest.mark.tools
def test_alerts_fire_when_they_should_and_only_then(promtool: Path, tmp_path: Path) -> None:
    trials = [Trial(name=alert, rules=closure(RULEBOOK, alert), cases=CASES[alert]) for alert in ALERTS]
    wrong = {name: failure for name, failure in outcomes(promtool, tmp_path, trials).items() if failure}
    assert not wrong, "\n".join(f"{name}: {failure}" for name, failure in wrong.items())


@pytest.mark.tools
def test_recorded_values_are_right(promtool: Path, tmp_path: Path) -> None:
    trials = [
        Trial(name=f"{number}", rules=closure(RULEBOOK, case.rule), cases=(case,))
        for number, case in enumerate(RECORDED)
    ]
    wrong = [failure for failure in outcomes(promtool, tmp_path, trials).values() if failure]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.unit
def test_every_rule_without_an_alert_has_values() -> None:
    apart = {rule.name for rule in RULEBOOK if not rule.alerting and not dependents(RULEBOOK, rule.name)}
    assert {name for name in apart if name.startswith("deepspeed:")}
    assert apart - {case.rule for case in RECORDED} == set()


def _rules_apart(alert: str) -> set[str]:
    """Return the severities of the rules with this name: each of them is an alert of its own."""
    return {rule.severity for rule in RULEBOOK if rule.name == alert}


@pytest.mark.unit
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_cases_of_both_kinds(alert: str) -> None:
    cases: tuple[Case, ...] = CASES[alert]
    fired = {firing.severity for case in cases for firing in case.fires}
    assert fired == _rules_apart(alert), "fires"
    silent = any(not case.fires for case in cases)
    ends = any(firing.until_s is not None for case in cases for firing in case.fires)
    assert silent or ends, "stays silent"
    assert all(case.moments_s for case in cases), "is looked at"


@pytest.mark.unit
def test_no_case_belongs_to_an_alert_that_is_gone() -> None:
    assert set(CASES) == set(ALERTS)
