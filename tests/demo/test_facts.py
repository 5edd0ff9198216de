"""The demonstration's report agrees with its job and the job's metrics."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from deploy.demo.facts import asked_for, ran_as
from deploy.demo.logs import LossPoint
from deploy.demo.report import Outcome, table
from deploy.demo.story import EXAMPLE, Story
from zerotrain.contract.config import load, resolve

pytestmark = pytest.mark.unit

CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "off": {"bf16": {"enabled": False}, "zero_optimization": {"stage": 3}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_stage_and_number_format_are_those_that_the_engine_takes(name: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, **CONFIGS[name]}
    engine = resolve(load(config), world_size=4)
    lines = asked_for({"workers": 4, "config": config})
    assert lines == f"4 workers, ZeRO stage {engine.zero.stage}, {engine.precision.compute_dtype}"


def test_the_applied_job_is_described_and_no_other() -> None:
    job = YAML(typ="safe", pure=True).load(EXAMPLE.read_text())
    job["spec"] |= {"workers": 5, "config": {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}}
    lines: list[str] = []

    class Recorder:
        print_line = staticmethod(lines.append)
        show = staticmethod(lambda *_: None)

    class Answering:
        namespace = "demo"
        run = staticmethod(lambda *_: "")
        get = staticmethod(lambda kind, *_: {"items": [], "status": {"phase": "Stalled"}})

    story = Story(Answering(), Recorder())  # type: ignore[arg-type]
    story.spec = job
    outcome = story.run()
    assert lines[0].endswith(": 5 workers, ZeRO stage 0, bf16")
    assert outcome.title == f"{job['metadata']['name']}: {job['spec']['data']['path']}"


EXPOSITION = """# TYPE zerotrain_rank info
zerotrain_rank_info{rank="0",attempt="1",world_size="6",zero_stage="2",dtype="fp16"} 1
# TYPE zerotrain_step gauge
zerotrain_step{rank="0"} 3
"""


def test_the_report_shows_what_the_ranks_reported() -> None:
    assert ran_as(EXPOSITION) == "6 ranks, ZeRO stage 2, fp16"
    outcome = Outcome(
        title="gpt",
        status={},
        total_steps=1,
        points=(LossPoint(attempt=1, step=1, loss=1.0, seen_at=1.0),),
        killed_at=0.0,
        killed_after_step=1,
        metrics=EXPOSITION,
    )
    shown = [list(column.cells) for column in table(outcome).columns]
    assert "6 ranks, ZeRO stage 2, fp16" in shown[1]


@pytest.mark.parametrize("metrics", ["", "# TYPE zerotrain_step gauge\nzerotrain_step 3\n"])
def test_nothing_is_reported_for_silent_ranks(metrics: str) -> None:
    assert ran_as(metrics) is None
