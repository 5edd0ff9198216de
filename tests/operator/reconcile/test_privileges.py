"""Table of `reconcile` for jobs that request RDMA: one message, and a namespace that rejects the pods is a
stall.
"""

from __future__ import annotations

import pytest

from tests.operator.reconcile_builders import ALL, Row, Want, check, job, pending, ready, seen, status
from zerotrain.operator.reconcile import CreateWorkers, Problem

pytestmark = pytest.mark.unit


RDMA = {"resources": {"rdma": {"resourceName": "rdma/hca"}}, "scheduling": {"gang": "None"}}
CREATE = CreateWorkers(attempt=1, indices=ALL)
REFUSED = Problem(
    reason="PodSecurity", message='violates PodSecurity "restricted:latest": ... IPC_LOCK', lasting=True
)
PENDING = status("Pending", podsCreated=False)
REFUSED_SIZE = {
    "type": "Stalled",
    "status": "True",
    "reason": "PodSecurity",
    "message": "",
    "lastTransitionTime": "2026-01-01T11:00:00Z",
}

ROWS = [
    Row(
        id="the first attempt says what its pods may",
        job=job(spec=RDMA),
        seen=seen(),
        want=Want(
            phase="Pending",
            actions=(CREATE,),
            events=("IpcLockAdded",),
            conditions={"Admitted": ("True", "SpecAccepted"), "Stalled": ("False", "SpecAccepted")},
            messages={"event": "IPC_LOCK", "Admitted": "no NetworkPolicy applies to traffic over RDMA"},
        ),
    ),
    Row(
        id="a later one does not",
        job=job(spec=RDMA, status=status("Restarting")),
        seen=seen(),
        want=Want(attempt=2, events=()),
    ),
    Row(
        id="a job without it says nothing",
        job=job(spec={"scheduling": {"gang": "None"}}),
        seen=seen(),
        want=Want(phase="Pending", events=(), actions=(CREATE,)),
    ),
    Row(
        id="refused by the namespace: stalled, said once, and tried again",
        job=job(spec=RDMA, status=PENDING),
        seen=seen(problem=REFUSED),
        want=Want(
            phase="Pending",
            actions=(CREATE,),
            events=("PodSecurity",),
            conditions={
                "Stalled": ("True", "PodSecurity"),
                "Reconciling": ("False", "PodSecurity"),
                "Ready": ("False", "PodSecurity"),
            },
            messages={"Stalled": "IPC_LOCK"},
        ),
    ),
    Row(
        id="allowed meanwhile",
        job=job(spec=RDMA, status={**PENDING, "conditions": [REFUSED_SIZE]}),
        seen=seen(pending(0), pending(1)),
        want=Want(phase="Pending", actions=(), conditions={"Stalled": ("False", "SpecAccepted")}),
    ),
    Row(
        id="suspended: nothing is wanted that could be refused",
        job=job(spec={**RDMA, "suspend": True}, status={"phase": "Suspended", "attempt": 1}),
        seen=seen(problem=REFUSED),
        want=Want(phase="Suspended", conditions={"Stalled": ("False", "SpecAccepted")}),
    ),
    Row(
        id="a running job keeps the word on its pods",
        job=job(spec=RDMA, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", messages={"Admitted": "IPC_LOCK"}),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)
