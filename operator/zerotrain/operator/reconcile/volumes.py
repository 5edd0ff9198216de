"""The check of requireEncryptedVolume before an attempt: no pod until the StorageClass declares encryption.

A class is read once before the job's first attempt under this operator, and again if that was a while ago:
parameters of a class never change, but it may be deleted and recreated, and annotations change.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from zerotrain.operator.api import Phase, ZeroTrainingJobSpec
from zerotrain.operator.constants import ANNOTATION_ENCRYPTED_VOLUMES, Reason
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import StorageClassView
from zerotrain.operator.reconcile.plan import AskStorageClass

LOOK_AGAIN: Final = timedelta(seconds=60)
"""Time after which a rejected class is read again; also the maximum age of an accepted one before the next
attempt."""


def awaits_class(draft: Draft, *, max_age: timedelta | None = None) -> bool:
    """Return whether a class must be read first, and request it. Without `max_age` any earlier reading
    suffices."""
    waits = False
    for wanted in _wanted(draft.job.spec):
        view = _view(draft, wanted)
        if view is None or (max_age is not None and draft.now - view.at > max_age):
            draft.act(wanted)
            waits = True
    if waits:
        draft.set(phase=draft.status.phase or Phase.PENDING)
    return waits


def refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if a class was read and does not guarantee that its volume is encrypted."""
    for wanted in _wanted(draft.job.spec):
        view = _view(draft, wanted)
        if view is None or view.encryption is not None:
            continue
        due = view.at + LOOK_AGAIN
        if draft.now < due:
            draft.wake(due)
        else:
            draft.act(wanted)
        if view.problem is not None:
            return str(Reason.STORAGE_CLASS_UNKNOWN), _unknown(wanted, view)
        return str(Reason.VOLUME_NOT_ENCRYPTED), _plain(wanted, view)
    return None


def _plain(wanted: AskStorageClass, view: StorageClassView) -> str:
    field = f"{wanted.field}.requireEncryptedVolume"
    if not view.name:
        return (
            f"{field}: claim {wanted.claim} has no StorageClass, so nothing declares that its volume is "
            "encrypted. Take a claim with a class that does"
        )
    behind = f" of claim {wanted.claim}" if wanted.claim else ""
    return (
        f"{field}: StorageClass {view.name}{behind} does not declare that its volumes are encrypted, by no "
        "parameter that its driver is known for. Take a class that does, or, if its volumes are encrypted "
        f"all the same, have its owner say so: kubectl annotate storageclass {view.name} "
        f"{ANNOTATION_ENCRYPTED_VOLUMES}=true"
    )


def _unknown(wanted: AskStorageClass, view: StorageClassView) -> str:
    field = f"{wanted.field}.requireEncryptedVolume"
    if not view.name:
        return (
            f"{field}: claim {wanted.claim} cannot be read: {view.problem}. Make it, or name one that "
            "exists; where the operator may not read it, grant its account get on persistentvolumeclaims"
        )
    return (
        f"{field}: StorageClass {view.name} cannot be read: {view.problem}. Name one that exists; where the "
        "operator may not read it, grant its account the verb get on storageclasses.storage.k8s.io in a "
        "ClusterRole, or recreate the job without requireEncryptedVolume"
    )


def _wanted(spec: ZeroTrainingJobSpec) -> Iterator[AskStorageClass]:
    """Yield what must be read for the job; the rules of the spec ensure that a claim or a class is named."""
    nvme, checkpoint = spec.nvme, spec.checkpoint
    if nvme is not None and nvme.require_encrypted_volume and nvme.storage_class_name is not None:
        yield AskStorageClass(field="spec.nvme", name=nvme.storage_class_name)
    if checkpoint is None or not checkpoint.require_encrypted_volume:
        return
    claim, made = checkpoint.volume.persistent_volume_claim, checkpoint.volume.ephemeral
    if claim is not None:
        yield AskStorageClass(field="spec.checkpoint", claim=claim.claim_name)
    elif made is not None and made.volume_claim_template.spec.storage_class_name is not None:
        yield AskStorageClass(
            field="spec.checkpoint", name=made.volume_claim_template.spec.storage_class_name
        )


def _view(draft: Draft, wanted: AskStorageClass) -> StorageClassView | None:
    """Return the answer to this question; None without one."""
    views = draft.observed.storage_classes
    return next((view for view in views if view.answers(wanted.field, wanted.claim, wanted.name)), None)
