"""Comparison of the four rules in common use for DeepSpeed jobs with ours, on the same series, by promtool.

docs/alerts.md tells its readers what the former miss; each row of its table is a story here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.monitoring.rules.rulebook import REPOSITORY, Rule, load, rule_of
from tests.monitoring.rules.runner import Trial, outcomes
from tests.monitoring.rules.stories import FOUND_BY_ALL, STORIES

COMMON = Path(__file__).with_name("rules") / "common.yaml"
PAGE = REPOSITORY / "docs" / "alerts.md"
OF_LABELS = "it fires at night"
"""The row of the table that no series can show."""


def common() -> tuple[Rule, ...]:
    document = YAML(typ="safe", pure=True).load(COMMON.read_text())
    return tuple(rule_of(raw) for group in document["groups"] for raw in group["rules"])


@pytest.mark.tools
def test_ours_fire_once_where_the_common_ones_are_silent_or_fire_for_every_rank(
    promtool: Path, tmp_path: Path
) -> None:
    # Our recordings of the same names are left out: they would be a fifth series, which is right.
    rules = (*common(), *(rule for rule in load() if not rule.name.startswith("deepspeed:")))
    trials = [Trial(name="common", rules=rules, cases=(*STORIES, *FOUND_BY_ALL))]
    failures = outcomes(promtool, tmp_path, trials)["common"]
    assert not failures, failures


@pytest.mark.unit
def test_every_row_of_the_page_is_a_story() -> None:
    section = PAGE.read_text().split("## Four common rules")[1].split("\n## ")[0]
    table = section.split("| what happens |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", table, flags=re.MULTILINE)
    assert sorted(rows) == sorted([*(story.name for story in STORIES), OF_LABELS])


@pytest.mark.unit
def test_two_of_the_common_ones_have_no_severity_and_none_a_runbook() -> None:
    assert [bool(rule.severity) for rule in common()] == [True, False, False, True]
    assert not any("runbook_url" in rule.annotations for rule in common())


@pytest.mark.tools
def test_promtool_refuses_to_have_their_names_exported(promtool: Path) -> None:
    exposition = "# HELP deepspeed:grad_norm Norm.\n# TYPE deepspeed:grad_norm gauge\ndeepspeed:grad_norm 1\n"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "':'" in done.stderr
