"""Statuses that a node could report for a tenant's pod, or an admin could write by hand.

There is one row for each; a worker of its own job gets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.cluster.hostile.bodies import nested_lists
from tests.cluster.hostile.texts import DIRT, filled

Json = dict[str, Any]
MEGABYTE = 1_000_000
LONG_AGO, FAR_AHEAD = "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"


def container(state: Json, name: str = "worker", **more: Any) -> Json:
    return {
        "name": name,
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": state,
        **more,
    }


def ended(message: str, code: int = 1, reason: str = "Error", **more: Any) -> Json:
    """Return the status of a worker that ended with this termination message."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message, **more}}
    return {"phase": "Failed", "containerStatuses": [container(state)]}


def ended_with_record(**words: Any) -> Json:
    """Return the same with a termination message in the launcher's own form."""
    record = {"attempt": 1, "code": 1, "rank": 0, **words}
    return ended(json.dumps(record))


def waits(reason: str, message: str) -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [container(state)]}


def condition(kind: str, status: str, **more: str) -> Json:
    return {"conditions": [{"type": kind, "status": status, **more}]}


def of_init(state: Json, name: str = "fetch") -> Json:
    return {"phase": "Failed", "initContainerStatuses": [container(state, name)]}


OTHER_RANK = [{"rank": 1, "code": 1, "reason": DIRT}]
TYPES = '{"attempt": {}, "code": [], "rank": "x", "checkpoint": 5, "also_failed": {"a": 1}}'
NUMBERS = '{"attempt": 1, "code": 1, "step": NaN, "checkpoint": {"step": 1e999, "path": "/c", "time": NaN}}'
MANY_CONTAINERS = [container({"waiting": {"reason": DIRT}}, f"c{at}") for at in range(500)]
MANY_CONDITIONS = [{"type": f"t{at}", "status": "True", "message": DIRT} for at in range(2_000)]
TWICE = [container({"running": {}}), container({})]

STATUSES: Mapping[str, Json] = {
    "words-dirty": ended(DIRT),
    "words-of-the-launcher": ended_with_record(exception=DIRT, last_line=DIRT, also_failed=OTHER_RANK),
    "words-checkpoint": ended_with_record(checkpoint={"step": 3, "path": f"/c/{DIRT}", "time": 1.0}),
    "words-megabyte": ended(filled(DIRT, MEGABYTE // 6)),
    "words-deep": ended(nested_lists(100_000)),
    "words-numbers": ended('{"attempt": 1, "code": ' + "9" * 5000 + ', "step": 1e400}'),
    "words-types": ended(TYPES),
    "words-half-pair": ended('{"attempt": 1, "code": 1, "exception": "\\ud800"}'),
    "words-not-a-number": ended(NUMBERS),
    "reason-dirty": ended("x", reason=DIRT),
    "code-lowest": ended("x", code=-(2**31)),
    "code-highest": ended("x", code=2**31 - 1),
    "signal": ended("x", code=137, signal=99_999),
    "times": ended("x", startedAt=FAR_AHEAD, finishedAt=LONG_AGO),
    "waits-dirty": waits("ImagePullBackOff", DIRT),
    "waits-config": waits("CreateContainerConfigError", filled(DIRT, 100_000)),
    "waits-reason": waits(DIRT, DIRT),
    "pod-reason": {"phase": "Failed", "reason": DIRT, "message": DIRT},
    "pod-evicted": {"phase": "Failed", "reason": "Evicted", "message": DIRT},
    "phase-unknown": {"phase": "Unknown", "message": DIRT},
    "unscheduled": condition("PodScheduled", "False", reason="Unschedulable", message=DIRT),
    "unscheduled-reason": condition("PodScheduled", "False", reason=DIRT, message=filled(DIRT, 50_000)),
    "condition-kind": condition(DIRT, "True", reason=DIRT, message=DIRT),
    "condition-status": condition("Ready", "Maybe", message=DIRT, lastTransitionTime=LONG_AGO),
    "disrupted": condition("DisruptionTarget", "True", reason=DIRT, lastTransitionTime=FAR_AHEAD),
    "init-dirty": of_init({"terminated": {"exitCode": 3, "reason": DIRT, "message": DIRT}}),
    "init-name": of_init({"terminated": {"exitCode": 3, "reason": "Error", "message": DIRT}}, "x" * 63),
    "init-waits": of_init({"waiting": {"reason": "CrashLoopBackOff", "message": DIRT}}),
    "containers-many": {"containerStatuses": MANY_CONTAINERS},
    "containers-twice": {"phase": "Running", "containerStatuses": TWICE},
    "containers-none": {"phase": "Failed", "containerStatuses": []},
    "conditions-many": {"conditions": MANY_CONDITIONS},
    "address-of-metadata": {
        "phase": "Running",
        "podIP": "169.254.169.254",
        "podIPs": [{"ip": "169.254.169.254"}],
        "containerStatuses": [container({"running": {"startedAt": LONG_AGO}}, ready=True)],
        **condition("Ready", "True"),
    },
}  # fmt: skip
"""Statuses by name, which is also the job's name."""
