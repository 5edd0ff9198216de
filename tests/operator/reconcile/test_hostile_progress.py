"""Hostile progress records, which a tenant's program writes: no number or text in them may end a pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, job, progress, ready, seen, status
from zerotrain.contract.progress import (
    MAX_PATH_CHARS,
    MAX_RANKS,
    MAX_REJECTED,
    MAX_TEXT_CHARS,
    CheckpointProgress,
    Progress,
    RejectedCheckpoint,
    Termination,
)
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.cluster.events import event_body
from zerotrain.operator.reconcile import Event, reconcile

pytestmark = pytest.mark.unit


RUNNING = job(status=status("Running"))
NO_TIMES = [1e15, 1e308, float("inf"), float("nan"), -1.0, 2.0**62]


@pytest.mark.parametrize("moment", NO_TIMES)
def test_a_time_that_no_calendar_has_is_no_time(moment: float) -> None:
    saved = CheckpointProgress(step=3, path="/ckpt/3", time=moment)
    record = progress(5, heartbeat_at=moment, step_at=moment, checkpoint=saved)
    plan = reconcile(RUNNING, seen(ready(0), ready(1), progress=record), NOW)
    assert plan.status is not None
    assert plan.status.progress.step == 5
    assert plan.status.progress.last_heartbeat is None
    assert plan.status.checkpoint.last is not None
    assert plan.status.checkpoint.last.time is None


def test_rejected_checkpoints_do_not_flood_the_events() -> None:
    damaged = tuple(RejectedCheckpoint(path=f"/ckpt/{number}", reason="short") for number in range(1000))
    record = progress(5, rejected_checkpoints=damaged)
    plan = reconcile(RUNNING, seen(ready(0), ready(1), progress=record), NOW)
    assert sum(1 for event in plan.events if event.reason == "CheckpointRejected") == 20


def test_an_event_of_half_a_character_can_be_written() -> None:
    event = Event(reason="Killed", message="rank \ud800", attempt=1)
    assert event_body(RUNNING, event, instance="a", now=NOW)["note"] == "rank ?"


@pytest.mark.parametrize(
    "changes", [{"step": 10**400}, {"loss": 10**400}, {"step": 2**63}, {"rejected_checkpoints": 5}]
)
def test_what_does_not_fit_a_record_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Progress.from_json(json.dumps({"rank": 0, "attempt": 1, **changes}))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"ranks": 5}', '{"ranks": ["x"]}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|must"):
        WorkerReport.from_json(text)


def report_of(ranks: int) -> str:
    records = ",".join(f'{{"rank":{rank},"attempt":1}}' for rank in range(ranks))
    known = '"job":"gpt","job_uid":"u","attempt":1,"node_rank":0,"world_size":8'
    return f'{{{known},"ranks":[{records}]}}'


@pytest.mark.parametrize(
    "changes",
    [
        {"job": [{}] * 9}, {"job_uid": 5}, {"attempt": {}}, {"node_rank": "0"}, {"world_size": 2**63},
        {"ready": [[]]}, {"stopping": 1},
    ],
)  # fmt: skip
def test_fields_of_a_report_have_their_types(changes: dict[str, Any]) -> None:
    """A megabyte of empty objects would take twenty-five of memory."""
    known = json.loads(report_of(1))
    with pytest.raises(ValueError, match=f"WorkerReport.{next(iter(changes))} must"):
        WorkerReport.from_json(json.dumps({**known, **changes}))


def test_the_name_of_the_job_in_a_report_is_bounded_and_clean() -> None:
    read = WorkerReport.from_json(json.dumps({**json.loads(report_of(1)), "job": "\x1b[31m" + "x" * 9000}))
    assert MAX_TEXT_CHARS - 9 < len(read.job) <= MAX_TEXT_CHARS
    assert "\x1b" not in read.job


def test_a_report_of_more_ranks_than_a_worker_has_is_refused_before_any_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(WorkerReport.from_json(report_of(MAX_RANKS)).ranks) == MAX_RANKS
    read: list[object] = []
    monkeypatch.setattr(Progress, "from_record", read.append)
    with pytest.raises(ValueError, match=r"WorkerReport.ranks must have at most 64 entries; got 45000"):
        WorkerReport.from_json(report_of(45_000))
    assert read == []


def test_no_job_has_more_ranks_a_worker_than_a_report_may_hold() -> None:
    schema = ZeroTrainingJobSpec.model_json_schema(by_alias=True)
    ranks, gpus = schema["properties"]["ranksPerWorker"], schema["$defs"]["Gpus"]["properties"]["count"]
    assert (ranks["anyOf"][0]["le"], gpus["le"]) == (MAX_RANKS, MAX_RANKS)


def test_a_local_run_has_all_ranks_in_one_worker() -> None:
    assert len(WorkerReport.from_json(report_of(100), max_ranks=100).ranks) == 100


def test_of_damaged_checkpoints_the_newest_are_read() -> None:
    damaged = [{"path": f"/ckpt/{number}", "reason": "short"} for number in range(10_000, 0, -1)]
    read = Progress.from_json(json.dumps({"rank": 0, "attempt": 1, "rejected_checkpoints": damaged}))
    assert len(read.rejected_checkpoints) == MAX_REJECTED
    assert read.rejected_checkpoints[0].path == "/ckpt/10000"


LONG = "\x01" * 300_000


@pytest.mark.parametrize("kind", [Progress, Termination])
def test_the_path_of_a_checkpoint_is_bounded(kind: type[Progress | Termination]) -> None:
    def record(path: str) -> str:
        checkpoint = {"step": 1, "path": path, "time": 1.0}
        return json.dumps({"rank": 0, "attempt": 1, "code": 1, "checkpoint": checkpoint})

    assert kind.from_json(record("x" * MAX_PATH_CHARS)).checkpoint is not None
    with pytest.raises(
        ValueError, match=r"CheckpointProgress.path must have at most 1024 characters; got 1025"
    ):
        kind.from_json(record("x" * (MAX_PATH_CHARS + 1)))


def test_other_texts_lose_their_middle() -> None:
    words = Termination.from_json(json.dumps({"attempt": 1, "code": 1, "last_line": LONG, "exception": LONG}))
    assert len(words.last_line or "") < 3000
    assert len(words.exception or "") < 3000
    damaged = {"path": LONG, "reason": LONG}
    read = Progress.from_json(json.dumps({"rank": 0, "attempt": 1, "rejected_checkpoints": [damaged]}))
    assert len(read.rejected_checkpoints[0].path) < 3000


def test_an_error_does_not_repeat_a_megabyte() -> None:
    with pytest.raises(ValueError, match="step") as caught:
        Progress.from_json(json.dumps({"rank": 0, "attempt": 1, "step": LONG}))
    assert len(str(caught.value)) < 500


def test_a_status_stays_small_whatever_the_ranks_say() -> None:
    saved = CheckpointProgress(step=3, path=LONG, time=1.0)
    plan = reconcile(RUNNING, seen(ready(0), ready(1), progress=progress(5, checkpoint=saved)), NOW)
    assert plan.status is not None
    assert len(json.dumps(plan.status.model_dump(mode="json"))) < 20_000
