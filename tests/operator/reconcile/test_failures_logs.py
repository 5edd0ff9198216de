"""Table of `reconcile` for the last lines of a failed rank: they are read before its pod goes, also over a
restart of the operator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    last_words,
    ready,
    seen,
    stamp,
    status,
)
from zerotrain.operator.reconcile import DeletePods, DeleteWorkers, LogView, NodeView, PodView, SaveLog

pytestmark = pytest.mark.unit


TITLE = "attempt 1, pod gpt-1-0, node node-0: Killed, exit code 137"
READABLE = LogView()
SAVE = SaveLog(attempt=1, pod="gpt-1-0", rank=0, key="attempt-1.log", title=TITLE)
THEN_IT = DeletePods(names_uids=(("gpt-1-0", "pod-1-0"),), grace_s=1)
OTHERS = DeleteWorkers(attempt=1, grace_s=1, spared=0)
ALL = DeleteWorkers(attempt=1, grace_s=1)
FAILURE = {
    "attempt": 1,
    "time": stamp(ago(3)),
    "pod": "gpt-1-0",
    "rank": 0,
    "node": "node-0",
    "exitCode": 137,
    "reason": "Killed",
    "log": "attempt-1.log",
}


def row(
    *pods: PodView, id: str, want: Want, phase: str = "Running", log: LogView | None = READABLE, **more: Any
) -> Row:
    observed = replace(seen(*pods, nodes=more.pop("nodes", {})), log=log)
    return Row(
        id=id, job=job(spec=more.pop("spec", None), status=status(phase, **more)), seen=observed, want=want
    )


ROWS = [
    row(
        ended(0, 137),
        ready(1),
        id="its peers go, its lines are read, then it goes",
        want=Want(
            phase="Restarting", actions=(OTHERS, SAVE, THEN_IT), fields={"failures.0.log": "attempt-1.log"}
        ),
    ),
    row(
        ended(0, 137),
        id="a job of one worker",
        spec={"workers": 1},
        want=Want(phase="Restarting", actions=(SAVE, THEN_IT)),
    ),
    row(
        ended(0, 255, exit_reason="Unknown"),
        ready(1),
        id="a node that is back may have kept it",
        want=Want(phase="Restarting", fields={"failures.0.log": "attempt-1.log"}),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="where no log can be read there is none",
        log=None,
        want=Want(phase="Restarting", actions=(ALL,), fields={"failures.0.log": ""}),
    ),
    row(
        ended(0, 137),
        going(1, grace_s=1),
        id="an operator that died before it read them: the next one does",
        phase="Restarting",
        failures=[FAILURE],
        want=Want(phase="Restarting", events=(), actions=(SAVE, THEN_IT)),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="or before anything was done",
        phase="Restarting",
        failures=[FAILURE],
        want=Want(actions=(OTHERS, SAVE, THEN_IT)),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="read, but the pods are still there",
        phase="Restarting",
        failures=[FAILURE],
        log=LogView(attempt=1),
        want=Want(actions=(ALL,), events=()),
    ),
    row(
        ended(0, 137, deletion_at=ago(-1), deletion_grace_s=1),
        going(1, grace_s=1),
        id="on its way already: nothing more to do",
        phase="Restarting",
        failures=[FAILURE],
        want=Want(actions=()),
    ),
    row(
        ready(1),
        id="gone already: the others go",
        phase="Restarting",
        failures=[FAILURE],
        want=Want(actions=(ALL,)),
    ),
    row(
        ended(0, 137, 2),
        ready(1, 2),
        id="the failure of an earlier attempt is not this one's",
        phase="Restarting",
        attempt=2,
        failures=[FAILURE],
        want=Want(actions=(DeleteWorkers(attempt=2, grace_s=1),)),
    ),
    row(
        ended(0, 137),
        ready(1, 2),
        id="nor does a pod that an earlier attempt left behind spare one of this",
        phase="Restarting",
        attempt=2,
        failures=[FAILURE],
        want=Want(actions=(ALL, DeleteWorkers(attempt=2, grace_s=1))),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="what could not be stored is told, and holds up nobody",
        phase="Restarting",
        failures=[FAILURE],
        log=LogView(attempt=1, error="the last lines of gpt-1-0 were not kept: quota"),
        want=Want(actions=(ALL,), events=("LogNotKept",), messages={"event": "attempt 1: the last lines"}),
    ),
    row(
        ready(0),
        ready(1),
        id="a node that does not answer is not asked",
        nodes={"node-0": NodeView(name="node-0", ready=False, not_ready_since=ago(100))},
        want=Want(phase="Restarting", actions=(ALL,), fields={"failures.0.log": ""}),
    ),
    row(
        ended(0, 1, termination=last_words(1, rank=3)),
        ready(1),
        id="of several ranks the one that failed",
        spec={"ranksPerWorker": 4},
        want=Want(
            actions=(
                OTHERS,
                replace(SAVE, rank=3, title="attempt 1, pod gpt-1-0, node node-0: RankFailed, exit code 1"),
                THEN_IT,
            )
        ),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="of several ranks an unknown one",
        spec={"ranksPerWorker": 4},
        want=Want(actions=(OTHERS, replace(SAVE, rank=None), THEN_IT)),
    ),
    row(
        ended(0, 64),
        ready(1),
        id="a job that fails keeps the pod, and its lines too",
        want=Want(
            phase="Failed",
            actions=(
                DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=1),
                replace(SAVE, title="attempt 1, pod gpt-1-0, node node-0: PermanentFailure, exit code 64"),
            ),
        ),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="cleanPodPolicy All: first the lines, then the pods",
        phase="Failed",
        spec={"runPolicy": {"cleanPodPolicy": "All"}},
        failures=[FAILURE],
        completionTime=stamp(ago(36000)),
        want=Want(actions=(OTHERS, SAVE, THEN_IT)),
    ),
    row(
        ended(0, 137),
        id="pods that were kept for long are not asked again by a new operator",
        phase="Failed",
        failures=[FAILURE],
        completionTime=stamp(ago(601)),
        want=Want(actions=()),
    ),
    row(
        ended(0, 137),
        ready(1),
        id="a job that is being suspended, too",
        phase="Suspending",
        spec={"suspend": True},
        checkpoint={"requestedAt": stamp(ago(1))},
        want=Want(
            phase="Suspending", actions=(OTHERS, SAVE, THEN_IT), fields={"failures.0.log": "attempt-1.log"}
        ),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_last_lines(row: Row) -> None:
    check(row)
