"""`zerotrain explain`: every word that the product shows leads to its meaning; nothing is explained twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zerotrain.cli.errors import CliError
from zerotrain.cli.explain import alerts, lookup, reasons
from zerotrain.cli.main import app
from zerotrain.contract.exit_codes import EXIT_CODES
from zerotrain.operator.api.elastic import SizeReason
from zerotrain.operator.api.failures import FailureReason
from zerotrain.operator.api.lifecycle import YieldReason
from zerotrain.operator.constants import ConditionType, Reason

pytestmark = pytest.mark.unit


RULES = """
groups:
- name: test
  rules:
  - record: deepspeed:grad_norm
    expr: max by (namespace, job_name) (zerotrain_grad_norm)
  - alert: ZeroTrainJobStalled
    expr: |
      time() - zerotrain_last_step_timestamp_seconds > 600
    for: 5m
    labels: {severity: critical}
    annotations: {summary: No step for long, description: It stands., runbook_url: "https://example.org/r"}
"""
RUNBOOK = "# X\n\n## Meaning\n\nNo step.\n\n## Mitigation\n\nRestart it.\n"


def explain(*words: str) -> Result:
    return CliRunner().invoke(app, ["explain", *words])


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rules and runbooks as a wheel installs them: in folders beside the package, without a checkout."""
    for name, file, text in (("rules", "a.yaml", RULES), ("runbooks", "ZeroTrainJobStalled.md", RUNBOOK)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    monkeypatch.setattr(alerts, "RULES", tmp_path / "rules")
    monkeypatch.setattr(alerts, "RUNBOOKS", tmp_path / "runbooks")
    return tmp_path


def test_every_reason_and_condition_of_the_operator_has_a_meaning() -> None:
    shown = {str(item) for kind in (Reason, FailureReason, YieldReason, SizeReason) for item in kind}
    assert shown == set(reasons.REASONS), shown ^ set(reasons.REASONS)
    assert {str(item) for item in ConditionType} == set(reasons.CONDITIONS)


@pytest.mark.parametrize("row", EXIT_CODES, ids=lambda row: row.name)
def test_every_exit_code_by_number_and_by_name(row: object) -> None:
    code, name = str(getattr(row, "code")), str(getattr(row, "name"))  # noqa: B009
    by_number, by_name = lookup.exit_code(code), lookup.exit_code(name.lower())
    assert by_number is not None
    assert by_number == by_name
    assert by_number.name == f"{code} {name}"


@pytest.mark.parametrize(
    ("word", "kind", "words"),
    [
        ("84", "exit code", "replace the node's drive"),
        ("139", "exit code", "killed by signal 11"),
        ("DoesNotFit", "reason", "zerotrain plan"),
        ("doesnotfit", "reason", "zerotrain plan"),
        ("Stalled", "condition", "before you correct it"),
        ("zerotrain_grad_norm", "metric", "before clipping"),
        ("zerotrain_step_duration_seconds_bucket", "metric", "histogram_quantile"),
        ("zero_optimization.stage", "configuration key", "sharded"),
        ("ZeroTrainJobStalled", "alert", "Restart it."),
        ("jobstalled", "alert", "No step for long"),
        ("deepspeed:grad_norm", "recorded metric", "zerotrain_grad_norm"),
    ],
)
def test_a_bare_word_is_explained(installed: Path, word: str, kind: str, words: str) -> None:
    done = explain(word, "-o", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert kind in [item["kind"] for item in found]
    assert words in json.dumps(found)
    assert words in " ".join(explain(word).output.split())


def test_a_sub_command_wins_over_a_word_and_explains_one_kind(installed: Path) -> None:
    assert "SPILL_INTEGRITY" in explain("exit-codes").output
    assert "ZeroTrainJobStalled" in explain("alert").output
    assert "Restart it." in explain("alert", "ZeroTrainJobStalled").output
    assert isinstance(explain("condition", "84").exception, CliError)
    assert isinstance(explain("metric", "DoesNotFit").exception, CliError)


def test_an_unknown_word_names_what_is_near() -> None:
    done = explain("DoesNotFits")
    assert isinstance(done.exception, CliError)
    assert (done.exception.code, done.exception.next_step) == (64, "did you mean DoesNotFit, DOES_NOT_FIT?")


def test_an_installation_without_rules_still_explains_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "RULES", tmp_path / "none")
    assert alerts.alerts() == {}
    assert explain("84").exit_code == 0


def test_every_alert_of_the_product_is_explained_with_its_runbook() -> None:
    known = alerts.alerts()
    assert len(known) >= 30
    for name, alert in known.items():
        assert set(alerts.SECTIONS) <= set(alert.runbook), f"docs/runbooks/{name}.md lacks a section"
        assert alert.summary, name
