"""Records that `-o json` and `-o yaml` print of plan, doctor, describe and checkpoint diff: every key at
every depth, and its type. Programs rely on them, so a change of one is a decision made here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.checkpoint_states import ThreadRanks, good, layout_for, make_state, on_ranks
from tests.support.commands import Done, zerotrain
from tests.support.job_states import job
from tests.support.small_api import served
from zerotrain.runtime.checkpoint import save

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "gpt.yaml"
RATES = ("--rate", "network=50", "--rate", "tflops=1", "--rate", "host=10", "--price", "2")

PLAN = {
    "assumptions": ["str"],
    "config_from": "str",
    "job": "str",
    "message": "str",
    "nearest": "NoneType",
    "nearest_tiers": "NoneType",
    "pace": {
        "bound_by": "str",
        "cost_per_billion_tokens": "float",
        "missing_rates": [],
        "parts": [{"amount": "str", "is_hidden": "bool", "phase": "str", "seconds": "float", "what": "str"}],
        "seconds": "float",
        "tokens": "int",
        "tokens_per_second": "float",
    },
    "parameters": "int",
    "phases": [
        {
            "activation_bytes": "int",
            "engine_bytes": "int",
            "host_bytes": "int",
            "name": "str",
            "network_bytes": "int",
        }
    ],
    "ranks": "int",
    "tiers": [
        {
            "activation_bytes": "int",
            "engine_bytes": "int",
            "estimated_bytes": "int",
            "least_bytes": "int",
            "limit_bytes": "int",
            "limit_from": "str",
            "margin_bytes": "int",
            "needed_bytes": "int",
            "per": "str",
            "per_rank_bytes": "int",
            "tier": "str",
            "verdict": "str",
        }
    ],
    "traffic": {
        "cross_node_bytes": "int",
        "network_bytes": "int",
        "nvme_bytes": "int",
        "nvme_pass_bytes": "int",
        "pcie_down_bytes": "int",
        "pcie_up_bytes": "int",
        "phases": {"backward_bytes": "int", "forward_bytes": "int", "step_bytes": "int"},
    },
    "verdict": "str",
}
DOCTOR = [{"group": "str", "name": "str", "note": "str", "state": "str", "value": "str"}]
DESCRIBE = {
    "advice": [{"command": "str", "text": "str"}],
    "happenings": [{"details": ["str"], "is_bad": "bool", "time": "str", "title": "str"}],
    "headline": "str",
    "name": "str",
    "namespace": "str",
    "phase": "str",
    "situation": ["str"],
}
DIFF = {
    "differences": [
        {
            "differing": "int",
            "fqn": "str",
            "kind": "str",
            "max_abs": "float",
            "note": "str",
            "numel": "int",
        }
    ],
    "steps": ["int"],
}


def shape(value: Any) -> Any:
    """Return the types by key; for a list of records the union of their keys, for another list its types."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return type(value).__name__
    if all(isinstance(item, dict) for item in value):
        return [shape({key: item[key] for item in value for key in item})] if value else []
    return sorted({type(item).__name__ for item in value})


def printed(done: Done, form: str) -> Any:
    """Return the record that a program reads, whatever exit code the command had."""
    assert done.err == ""
    return json.loads(done.out) if form == "json" else yaml.safe_load(done.out)


@pytest.fixture(params=["json", "yaml"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.unit
def test_a_plan(form: str) -> None:
    assert shape(printed(zerotrain("plan", EXAMPLE, *RATES, "-o", form), form)) == PLAN


@pytest.mark.unit
def test_what_the_doctor_finds(form: str, tmp_path: Path) -> None:
    found = printed(zerotrain("doctor", "--folder", tmp_path, "-o", form), form)
    assert shape(found) == DOCTOR
    assert len({tuple(item) for item in found}) == 1, "every finding has every key"


@pytest.mark.ranks
def test_the_records_of_a_job(form: str, tmp_path: Path) -> None:
    raw = job({"phase": "Failed"}).raw

    def answer(path: str) -> tuple[int, bytes]:
        nothing = {"kind": "List", "metadata": {}, "items": []}
        return 200, json.dumps(raw if path.endswith("/gpt") else nothing).encode()

    with served(answer, tmp_path) as kubeconfig:
        done = zerotrain("describe", "gpt", "-o", form, kubeconfig=kubeconfig)
    assert shape(printed(done, form)) == DESCRIBE


@pytest.mark.unit
def test_how_two_checkpoints_differ(form: str, tmp_path: Path) -> None:
    def saved(name: str, salt: int) -> Path:
        def action(group: ThreadRanks) -> Path:
            state = make_state(0, layout_for(1), salt=salt)
            return save(state, tmp_path / name, step=1, group=group).path

        return good(on_ranks(1, action))[0]

    done = zerotrain("checkpoint", "diff", saved("a", 0), saved("b", 1), "-o", form)
    assert done.code == 1
    assert shape(printed(done, form)) == DIFF
