"""reconcile of jobs whose spilled state must lie on an encrypted volume: no pod before the class says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    ready,
    seen,
    status,
)
from zerotrain.operator.reconcile import AskStorageClass, CreateWorkers, DeleteWorkers, StorageClassView

pytestmark = pytest.mark.unit


SPEC = {
    "nvme": {"size": "1Ti", "storageClassName": "fast", "requireEncryptedVolume": True},
    "scheduling": {"gang": "None"},
}
ASK = AskStorageClass(name="fast")
CREATE = CreateWorkers(attempt=1, indices=ALL)
REFUSED = {"Stalled": ("True", "VolumeNotEncrypted"), "Admitted": ("False", "VolumeNotEncrypted")}
STALLED = status("Stalled", attempt=0, podsCreated=False)


def view(encryption: str | None = None, *, s_ago: float = 1, **more: Any) -> StorageClassView:
    given: dict[str, Any] = {"name": "fast", "at": ago(s_ago), "encryption": encryption, **more}
    return StorageClassView(**given)


ROWS = [
    Row(
        id="the class is read before anything is created",
        job=job(spec=SPEC),
        seen=seen(),
        want=Want(
            phase="Pending", attempt=0, actions=(ASK,), conditions={"Stalled": ("False", "SpecAccepted")}
        ),
    ),
    Row(
        id="it encrypts: the job starts",
        job=job(spec=SPEC),
        seen=seen(storage_class=view("parameter encrypted: true")),
        want=Want(phase="Pending", attempt=1, actions=(CREATE,)),
    ),
    Row(
        id="it does not: no pod, and the way out",
        job=job(spec=SPEC),
        seen=seen(storage_class=view()),
        want=Want(
            phase="Stalled",
            attempt=0,
            actions=(),
            events=("VolumeNotEncrypted",),
            conditions=REFUSED,
            says={"Stalled": "kubectl annotate storageclass fast zerotrain.dev/encrypted-volumes=true"},
            wake_in_s=59,
        ),
    ),
    Row(
        id="told once, and looked at again after a minute",
        job=job(spec=SPEC, status=STALLED),
        seen=seen(storage_class=view(s_ago=60)),
        want=Want(phase="Stalled", attempt=0, actions=(ASK,), events=(), conditions=REFUSED),
    ),
    Row(
        id="annotated meanwhile: the job starts",
        job=job(spec=SPEC, status=STALLED),
        seen=seen(storage_class=view("annotation zerotrain.dev/encrypted-volumes")),
        want=Want(
            phase="Pending", attempt=1, actions=(CREATE,), conditions={"Stalled": ("False", "SpecAccepted")}
        ),
    ),
    Row(
        id="a class that is missing, or may not be read",
        job=job(spec=SPEC),
        seen=seen(storage_class=view(problem='storageclasses "fast" not found')),
        want=Want(
            phase="Stalled",
            actions=(),
            conditions={"Stalled": ("True", "StorageClassUnknown")},
            says={"Stalled": "get on storageclasses.storage.k8s.io"},
        ),
    ),
    Row(
        id="another class's word is none",
        job=job(spec=SPEC),
        seen=seen(storage_class=view("parameter encrypted: true", name="slow")),
        want=Want(phase="Pending", attempt=0, actions=(ASK,)),
    ),
    Row(
        id="an old word is read again before the next attempt",
        job=job(spec=SPEC, status=status("Restarting")),
        seen=seen(storage_class=view("parameter encrypted: true", s_ago=61)),
        want=Want(phase="Restarting", attempt=1, actions=(ASK,)),
    ),
    Row(
        id="what ended goes in any case",
        job=job(spec=SPEC, status=status("Restarting")),
        seen=seen(ended(0, 137), ready(1)),
        want=Want(phase="Restarting", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="a running attempt is not asked about",
        job=job(spec=SPEC, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", actions=()),
    ),
    Row(
        id="who does not ask for it needs no class",
        job=job(spec={**SPEC, "nvme": {"size": "1Ti", "storageClassName": "fast"}}),
        seen=seen(),
        want=Want(phase="Pending", attempt=1, actions=(CREATE,)),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)
