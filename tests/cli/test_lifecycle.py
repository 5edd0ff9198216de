"""Messages of `suspend`, `resume` and `scale` before they change anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Done, zerotrain
from tests.support.jobs import job_json
from tests.support.small_api import served
from zerotrain.client.command_exits import CommandExit

pytestmark = pytest.mark.ranks


def ask(folder: Path, *words: str, **status: Any) -> Done:
    """Run a command about a job `gpt` with this status; the server rejects every change."""
    raw = {**job_json({"metadata": {"name": "gpt", "namespace": "ml"}}), "status": status}
    with served(lambda path: (200, json.dumps(raw).encode()), folder) as kubeconfig:
        return zerotrain(*words, kubeconfig=kubeconfig)


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_a_finished_job_is_left_alone(verb: str, tmp_path: Path) -> None:
    done = ask(tmp_path, verb, "gpt", phase="Completed")
    assert (done.code, done.out) == (0, "")
    assert f"gpt is Completed: there is nothing to {verb}" in done.err


def test_a_dry_run_here_knows_what_may_not_change(tmp_path: Path) -> None:
    done = ask(tmp_path, "scale", "gpt", "--workers", "7", "--dry-run", "client", phase="Running")
    assert done.code == CommandExit.INVALID, done.err
    assert "workers is immutable unless elastic is given" in done.err
    done = ask(tmp_path, "suspend", "gpt", "--dry-run", "client", "-o", "name", phase="Running")
    assert (done.code, done.out) == (0, "zerotrainingjob.zerotrain.dev/gpt\n"), done.err
