"""The memory plan beside the memory in use, as users are shown it: margins, and the step time by data
sheet.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import zerotrain
from tests.support.job_states import job
from tests.support.small_api import served
from zerotrain.cli.report.cluster import of_job

pytestmark = pytest.mark.ranks


GIB = 1 << 30
PLAN: dict[str, Any] = {
    "verdict": "Fits",
    "ranks": 4,
    "gpuBytes": 60 * GIB,
    "hostBytes": 100 * GIB,
    "tiers": [
        {
            "tier": "gpu",
            "per": "rank",
            "neededBytes": 60 * GIB,
            "limitBytes": 80 * GIB,
            "marginBytes": 20 * GIB,
        },
        {"tier": "host", "per": "worker", "neededBytes": 201 * GIB},
    ],
    "pace": {"seconds": 1.873, "boundBy": "compute in backward", "missingRates": ["network"]},
    "observed": {"attempt": 2, "gpuBytes": 50 * GIB},
}
TIGHT = {
    "tier": "host",
    "per": "worker",
    "neededBytes": 8 * GIB,
    "limitBytes": 4 * GIB,
    "marginBytes": -4 * GIB,
}
NEAREST = {"changes": ['"zero_optimization": {"stage": 3}'], "tiers": []}
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "margins and a step",
        PLAN,
        [
            "gpu 60 GiB 50 GiB 20 GiB (25%) of the GPU's 80 GiB",
            "host 100 GiB - -",
            "a step, by data sheet: at least 1.87 s, bound by compute in backward (network not counted); "
            "now 0.5 s",
        ],
        [],
    ),
    (
        "one that does not fit",
        {**PLAN, "verdict": "DoesNotFit", "tiers": [TIGHT], "nearest": NEAREST, "pace": {"seconds": 2}},
        [
            "host 100 GiB - -4 GiB (-100%) of the worker's 4 GiB",
            "of the nearest that fits about 2 s; now 0.5",
        ],
        ["bound by"],
    ),
    (
        "one of an earlier operator",
        {"verdict": "Fits", "hostBytes": 2 * GIB},
        ["host 2 GiB - -", "fit: Fits"],
        ["data sheet"],
    ),
    (
        "nonsense",
        {
            "verdict": "Fits\x1b[2J",
            "hostBytes": 2 * GIB,
            "tiers": [
                7,
                {"tier": "host", "per": "\x1b[2J", "limitBytes": GIB, "marginBytes": 0},
                {"tier": []},
            ],
            "pace": {"seconds": "soon", "boundBy": "\x1b[2J"},
            "nearest": "x",
        },
        ["host 2 GiB"],
        ["data sheet", "\x1b"],
    ),
]


def described(plan: dict[str, Any], folder: Path) -> str:
    raw = job({"memoryPlan": plan}).raw

    def answer(path: str) -> tuple[int, bytes]:
        nothing = {"kind": "List", "metadata": {}, "items": []}
        return 200, json.dumps(raw if path.endswith("/gpt") else nothing).encode()

    with served(answer, folder) as kubeconfig:
        done = zerotrain("describe", "gpt", kubeconfig=kubeconfig)
    assert done.code == 0, done.err
    return "\n".join(" ".join(line.split()) for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("plan", "expected", "silent"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_describe(plan: dict[str, Any], expected: list[str], silent: list[str], tmp_path: Path) -> None:
    text = described(plan, tmp_path)
    for words in expected:
        assert words in text
    for words in silent:
        assert words not in text


class OneJob:
    """A client that knows one job, whose workers are gone."""

    transport = SimpleNamespace(server=SimpleNamespace(url="https://127.0.0.1:6443"))

    def __init__(self, plan: dict[str, Any]) -> None:
        self._job = job({"memoryPlan": plan})

    def get(self, name: str) -> Any:
        return self._job

    def worker_text(self, name: str, path: str) -> str | None:
        return None


def facts(plan: dict[str, Any]) -> dict[str, str]:
    client: Any = OneJob(plan)
    return dict(of_job(client, "gpt", history_folder=None).facts)


def test_the_report() -> None:
    found = facts(PLAN)
    assert found["memory plan"] == "Fits; left: gpu 20 GiB (25%) of the GPU's 80 GiB"
    assert found["a step, by data sheet"].startswith("at least 1.87 s, bound by compute in backward")
    old = facts({"verdict": "Fits", "hostBytes": 2 * GIB})
    assert old["memory plan"] == "Fits"
    assert "a step, by data sheet" not in old
