"""A stored status of which a part cannot be read: the job goes on without it, and an event names it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.operator.reconcile_builders import NOW, ago, job, ready, seen, settled, stamp, status
from zerotrain.operator.reconcile import reconcile
from zerotrain.operator.reconcile.draft import Known

pytestmark = pytest.mark.unit

ELASTIC = {"spec": {"elastic": {"minWorkers": 1, "maxWorkers": 4}}}
PODS = (ready(0), ready(1))


def training(**unfit: Any) -> dict[str, Any]:
    """Return a job that trains, with these parts in its status, and with nothing left to write."""
    found = settled(job(status=status("Running", podsCreated=True), **ELASTIC), seen(*PODS))
    found["status"] |= unfit
    return found


@pytest.mark.parametrize(
    ("part", "value", "place"),
    [
        ("elastic", {"baseWorkers": 2}, "status.elastic.requestedWorkers: Field required"),
        ("hang", {"attempt": 1}, "status.hang.detectedAt: Field required"),
        ("yieldRequest", {"reason": "Later", "requestedAt": stamp(ago(5))}, "status.yieldRequest.reason: "),
        ("conditions", [{"type": "Ready", "status": "True"}], "status.conditions.0.reason: Field required"),
        (
            "restarts",
            {"recent": [{"time": stamp(ago(5)), "cause": "luck"}]},
            "status.restarts.recent.0.cause",
        ),
        ("checkpoint", {"last": {"path": "/checkpoints/gpt/5"}}, "status.checkpoint.last.step"),
    ],
)
def test_the_job_goes_on_without_a_part_that_cannot_be_read(part: str, value: Any, place: str) -> None:
    plan = reconcile(training(**{part: value}), seen(*PODS), NOW)
    (event,) = [item for item in plan.events if item.reason == "StatusUnfit"]
    assert place in event.message
    assert event.type == "Warning"
    assert plan.status is not None, "what is stored must be replaced: actions read it, too"
    assert (plan.status.phase, plan.status.attempt) == ("Running", 1)
    assert not plan.actions


@pytest.mark.parametrize("part", ["phase", "attempt", "shape", "podsCreated"])
def test_nothing_is_decided_without_what_says_which_pods_are_the_jobs(part: str) -> None:
    """An attempt that is forgotten would go on beside the next one."""
    with pytest.raises(ValidationError, match=part):
        reconcile(training(**{part: {"of": "a newer version"}}), seen(*PODS), NOW)


def test_a_part_is_reported_until_the_status_is_written_without_it() -> None:
    known, found = Known(), training(hang={"attempt": 1})
    for _ in range(2):  # the first write may have met a conflict
        plan = reconcile(found, seen(*PODS), NOW, known)
        assert [event.reason for event in plan.events] == ["StatusUnfit"]
    assert plan.status is not None
    known.keep_status({"metadata": {"resourceVersion": "2"}}, plan.status)
    found["metadata"]["resourceVersion"] = "2"
    assert not reconcile(found, seen(*PODS), NOW, known).events
