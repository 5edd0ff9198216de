"""Table of `reconcile` for jobs whose spilled state must lie on an encrypted volume: no pod before the class
declares it.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

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
from tests.support.jobs import make_job
from zerotrain.operator.reconcile import AskStorageClass, CreateWorkers, DeleteWorkers, StorageClassView

pytestmark = pytest.mark.unit


SPEC = {
    "nvme": {"size": "1Ti", "storageClassName": "fast", "requireEncryptedVolume": True},
    "scheduling": {"gang": "None"},
}
ASK = AskStorageClass(name="fast")
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}
ASK_CLAIM = AskStorageClass(field="spec.checkpoint", claim="ckpt")
CHECKPOINT = {"volume": {"persistentVolumeClaim": {"claimName": "ckpt"}}, "requireEncryptedVolume": True}
CREATE = CreateWorkers(attempt=1, indices=ALL)
REFUSED = {"Stalled": ("True", "VolumeNotEncrypted"), "Admitted": ("False", "VolumeNotEncrypted")}
STALLED = status("Stalled", attempt=0, podsCreated=False)


def view(encryption: str | None = None, *, s_ago: float = 1, **more: Any) -> StorageClassView:
    given: dict[str, Any] = {"name": "fast", "at": ago(s_ago), "encryption": encryption, **more}
    return StorageClassView(**given)


def of_claim(
    name: str, encryption: str | None = None, *, claim: str = "ckpt", **more: Any
) -> StorageClassView:
    return view(encryption, field="spec.checkpoint", claim=claim, name=name, **more)


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
        seen=seen(storage_classes=(view("parameter encrypted: true"),)),
        want=Want(phase="Pending", attempt=1, actions=(CREATE,)),
    ),
    Row(
        id="it does not: no pod, and the way out",
        job=job(spec=SPEC),
        seen=seen(storage_classes=(view(),)),
        want=Want(
            phase="Stalled",
            attempt=0,
            actions=(),
            events=("VolumeNotEncrypted",),
            conditions=REFUSED,
            messages={"Stalled": "kubectl annotate storageclass fast zerotrain.dev/encrypted-volumes=true"},
            wake_in_s=59,
        ),
    ),
    Row(
        id="told once, and looked at again after a minute",
        job=job(spec=SPEC, status=STALLED),
        seen=seen(storage_classes=(view(s_ago=60),)),
        want=Want(phase="Stalled", attempt=0, actions=(ASK,), events=(), conditions=REFUSED),
    ),
    Row(
        id="annotated meanwhile: the job starts",
        job=job(spec=SPEC, status=STALLED),
        seen=seen(storage_classes=(view("annotation zerotrain.dev/encrypted-volumes"),)),
        want=Want(
            phase="Pending", attempt=1, actions=(CREATE,), conditions={"Stalled": ("False", "SpecAccepted")}
        ),
    ),
    Row(
        id="a class that is missing, or may not be read",
        job=job(spec=SPEC),
        seen=seen(storage_classes=(view(problem='storageclasses "fast" not found'),)),
        want=Want(
            phase="Stalled",
            actions=(),
            conditions={"Stalled": ("True", "StorageClassUnknown")},
            messages={"Stalled": "get on storageclasses.storage.k8s.io"},
        ),
    ),
    Row(
        id="another class's word is none",
        job=job(spec=SPEC),
        seen=seen(storage_classes=(view("parameter encrypted: true", name="slow"),)),
        want=Want(phase="Pending", attempt=0, actions=(ASK,)),
    ),
    Row(
        id="an old word is read again before the next attempt",
        job=job(spec=SPEC, status=status("Restarting")),
        seen=seen(storage_classes=(view("parameter encrypted: true", s_ago=61),)),
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
        id="checkpoints: the claim is read for its class",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(storage_classes=(view("parameter encrypted: true"),)),
        want=Want(phase="Pending", attempt=0, actions=(ASK_CLAIM,)),
    ),
    Row(
        id="both volumes encrypt: the job starts",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(storage_classes=(view("parameter encrypted: true"), of_claim("shared", "annotation"))),
        want=Want(phase="Pending", attempt=1, actions=(CREATE,)),
    ),
    Row(
        id="the spill's does and the checkpoints' does not",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(storage_classes=(view("parameter encrypted: true"), of_claim("shared"))),
        want=Want(
            phase="Stalled",
            attempt=0,
            actions=(),
            conditions=REFUSED,
            messages={"Stalled": "spec.checkpoint.requireEncryptedVolume: StorageClass shared of claim ckpt"},
        ),
    ),
    Row(
        id="a claim without a class",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(storage_classes=(view("parameter encrypted: true"), of_claim(""))),
        want=Want(
            phase="Stalled",
            conditions=REFUSED,
            messages={"Stalled": "claim ckpt has no StorageClass"},
        ),
    ),
    Row(
        id="a claim that is missing, or may not be read",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(storage_classes=(view("parameter encrypted: true"), of_claim("", problem="not found"))),
        want=Want(
            phase="Stalled",
            conditions={"Stalled": ("True", "StorageClassUnknown")},
            messages={"Stalled": "claim ckpt cannot be read: not found. Make it"},
        ),
    ),
    Row(
        id="another claim's word is none",
        job=job(spec={**SPEC, "checkpoint": CHECKPOINT}),
        seen=seen(
            storage_classes=(
                view("parameter encrypted: true"),
                of_claim("shared", "annotation", claim="other"),
            )
        ),
        want=Want(phase="Pending", attempt=0, actions=(ASK_CLAIM,)),
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


@pytest.mark.parametrize(
    "volume",
    [
        {"nfs": {"server": "s", "path": "/"}},
        {"emptyDir": {}},
        {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}},
    ],
    ids=["nfs", "a folder of the node", "a claim of the default class"],
)
def test_a_volume_of_which_nothing_is_declared_is_refused(volume: dict[str, Any]) -> None:
    checkpoint = {"volume": volume, "requireEncryptedVolume": True}
    with pytest.raises(ValidationError, match="requireEncryptedVolume needs a persistentVolumeClaim"):
        make_job({"spec.workers": 1, "spec.checkpoint": checkpoint})


def test_a_claim_that_is_made_with_the_pod_names_its_class() -> None:
    made = {"ephemeral": {"volumeClaimTemplate": {"spec": {**CLAIM, "storageClassName": "fast"}}}}
    spec = {**SPEC, "workers": 1, "checkpoint": {"volume": made, "requireEncryptedVolume": True}}
    ask = AskStorageClass(field="spec.checkpoint", name="fast")
    check(Row(id="", job=job(spec=spec), seen=seen(), want=Want(phase="Pending", actions=(ASK, ask))))
