"""The SDK's page names what the SDK has and what only the command line has; a plan equals the operator's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from tests.support.jobs import job_json
from tests.test_repo_shape import ROOT
from zerotrain.cli.main import app
from zerotrain.client import Client, JobFileError
from zerotrain.contract.planner import Fit

pytestmark = pytest.mark.unit


PAGE = (ROOT / "docs" / "python-sdk.md").read_text()
METHODS, _, COMMANDS = PAGE.partition("## What only the command line has")
OTHER_WORDS = {"top": "progress"}
"""Command -> the SDK method of the same function."""


def test_the_page_names_every_method() -> None:
    public = {name for name in dir(Client) if not name.startswith("_")}
    inner = {"connect", "transport", "api_client", "no_such_job", "worker_text", "namespace"}
    named = set(re.findall(r"`(\w+)\(", METHODS))
    assert public - inner == named


def test_every_command_is_a_method_or_listed_as_none() -> None:
    group = typer.main.get_command(app)
    shown = {name for name, command in group.commands.items() if not command.hidden}  # type: ignore[attr-defined]
    missing = {
        name
        for name in shown
        if not hasattr(Client, OTHER_WORDS.get(name, name)) and not re.search(rf"`{name}\b", COMMANDS)
    }
    assert missing == set()


def test_a_plan_is_the_operators_and_needs_no_cluster() -> None:
    raw = job_json()
    assert Client.plan(raw).ranks == 4
    assert Client.plan(raw, workers=3).ranks == 6
    raw["spec"]["resources"] = {"memory": "1Mi"}
    refused = Client.plan(raw)
    assert refused.verdict is Fit.DOES_NOT_FIT
    assert "host memory" in refused.message


def test_a_plan_of_a_wrong_job_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: zerotrain.dev/v1alpha1\nkind: ZeroTrainingJob\nspec: {workres: 2}\n")
    with pytest.raises(JobFileError, match="workres"):
        Client.plan(path)
    raw = job_json()
    raw["spec"]["workers"] = 0
    with pytest.raises(JobFileError, match=r"spec\.workers"):
        Client.plan(raw)
