"""Table of `reconcile` for attempts whose spec was edited under a suspension that came and went between two
passes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    ready,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api import spec as spec_rules
from zerotrain.operator.api.scheduling import Scheduling
from zerotrain.operator.api.storage import Checkpoint
from zerotrain.operator.reconcile import RequestYield, YieldState, reconcile
from zerotrain.operator.reconcile.yield_request import FROZEN, THAWED

pytestmark = pytest.mark.unit


YIELD = RequestYield(attempt=1, pod="gpt-1-0", pod_ip="10.0.0.0")
ACKED = YieldState(attempt=1, acked_at=ago(1))


def begun(**changes: object) -> dict[str, Any]:
    """Return a running job whose attempt began under generation 1; in generation 3 its spec has these
    changes.
    """
    plan = reconcile(job(), seen(), NOW)
    assert plan.status is not None
    shape = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)["shape"]
    return job(spec=changes, status=status("Running", shape=shape), generation=3)


SHORTER = {"volume": {"persistentVolumeClaim": {"claimName": "ckpt"}}, "gracePeriodSeconds": 1}
YIELDING = {"phase": "Suspending", "checkpoint": {"requestedAt": stamp(ago(30))}}
PASSED_OVER = [
    Row(
        id="an edit under a suspension that no pass saw: the attempt stops once, and the next one has it",
        job=begun(image="localhost/zerotrain:new"),
        seen=seen(ready(0), ready(1)),
        want=Want(
            phase="Suspending",
            attempt=1,
            actions=(YIELD,),
            events=("CheckpointRequested",),
            messages={"event": "the spec was changed while the job was briefly suspended"},
        ),
    ),
    *(
        Row(
            id=f"{next(iter(change))} may change at any time",
            job=begun(**change),
            seen=seen(ready(0), ready(1)),
            want=Want(phase="Running", actions=(), events=()),
        )
        for change in (
            {"runPolicy": {"ttlSecondsAfterFinished": 5}},
            {"failurePolicy": {"maxRestarts": 9}},
            {"hangPolicy": {"minTimeoutSeconds": 900}},
            {"scheduling": {"priorityClassName": "high"}},
        )
    ),
    Row(
        id="a grace that is lowered meanwhile does not cut the checkpoint short: the pods have the old one",
        job={
            **begun(checkpoint=SHORTER, suspend=True),
            "status": {
                **begun()["status"],
                "phase": "Suspending",
                "checkpoint": {"requestedAt": stamp(ago(30))},
            },
        },
        seen=seen(ready(0), ready(1), yielding=ACKED),
        want=Want(phase="Suspending", actions=(), wake_in_s=64),
    ),
]


@pytest.mark.parametrize("row", PASSED_OVER, ids=lambda row: row.id)
def test_spec_of_the_attempt(row: Row) -> None:
    check(row)


def test_after_the_stop_the_next_attempt_begins_at_once_and_stays() -> None:
    stored = begun(image="localhost/zerotrain:new")
    stored["status"] |= {"phase": "Suspending", "checkpoint": {"requestedAt": stamp(ago(5))}}
    after = settled(stored, seen(gone=(ended(0, 75), ended(1, 75))))
    assert (after["status"]["phase"], after["status"]["attempt"]) == ("Pending", 2)
    plan = reconcile(after, seen(ready(0, 2), ready(1, 2)), NOW)
    assert plan.status is not None
    assert plan.status.phase == "Running"


def test_every_part_of_the_spec_that_is_frozen_counts() -> None:
    frozen = {
        item.message.split(" can be changed only")[0]
        for item in spec_rules._CHANGES
        if "can be changed only while the job is suspended" in item.message
    }
    fields = {name: str(info.alias) for name, info in ZeroTrainingJobSpec.model_fields.items()}
    assert {name.split(".")[0] for name in frozen} == {fields[name] for name in FROZEN}
    models = {"checkpoint": Checkpoint.model_fields, "scheduling": Scheduling.model_fields}
    for name, thawed in THAWED.items():
        parts = {f"{name}.{info.alias}" for part, info in models[name].items() if part not in thawed}
        assert {item for item in frozen if item.startswith(f"{name}.")} == parts
