"""spec.nvme.requireEncryptedVolume at the gate: no pod before the StorageClass declares its encryption.

The class is read once before the job's first attempt of this operator's life, and again where that was a
while ago: parameters of a class never change, but it may be deleted and made anew, and annotations change.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from zerotrain.operator.api import Phase
from zerotrain.operator.constants import ANNOTATION_ENCRYPTED_VOLUMES, Reason
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.observe import StorageClassView
from zerotrain.operator.reconcile.plan import AskStorageClass

LOOK_AGAIN: Final = timedelta(seconds=60)
"""A class that was refused is read again after so long, and one that was fine before the next attempt."""


def awaits_class(draft: Draft, *, max_age: timedelta | None = None) -> bool:
    """Whether the class must be read first; asks for it. Without `max_age` any earlier reading will do."""
    wanted = _wanted(draft)
    if wanted is None:
        return False
    view = _view(draft, wanted)
    if view is not None and (max_age is None or draft.now - view.at <= max_age):
        return False
    draft.act(AskStorageClass(name=wanted))
    draft.set(phase=draft.status.phase or Phase.PENDING)
    return True


def refusal(draft: Draft) -> tuple[str, str] | None:
    """Reason and message where the class was read and the volume would not be encrypted for sure."""
    wanted = _wanted(draft)
    view = _view(draft, wanted) if wanted is not None else None
    if wanted is None or view is None or view.encryption is not None:
        return None
    due = view.at + LOOK_AGAIN
    if draft.now < due:
        draft.wake(due)
    else:
        draft.act(AskStorageClass(name=wanted))
    if view.problem is not None:
        return str(Reason.STORAGE_CLASS_UNKNOWN), _unknown(wanted, view.problem)
    return str(Reason.VOLUME_NOT_ENCRYPTED), (
        f"spec.nvme.requireEncryptedVolume: StorageClass {wanted} does not declare that its volumes are "
        "encrypted, by no parameter that its driver is known for. Take a class that does, or, if its volumes "
        f"are encrypted all the same, have its owner say so: kubectl annotate storageclass {wanted} "
        f"{ANNOTATION_ENCRYPTED_VOLUMES}=true"
    )


def _unknown(wanted: str, problem: str) -> str:
    return (
        f"spec.nvme.requireEncryptedVolume: StorageClass {wanted} cannot be read: {problem}. Name one that "
        "exists; where the operator may not read it, grant its account the verb get on "
        "storageclasses.storage.k8s.io in a ClusterRole, or make the job anew without requireEncryptedVolume"
    )


def _wanted(draft: Draft) -> str | None:
    nvme = draft.job.spec.nvme
    return nvme.storage_class_name if nvme is not None and nvme.require_encrypted_volume else None


def _view(draft: Draft, name: str) -> StorageClassView | None:
    view = draft.observed.storage_class
    return view if view is not None and view.name == name else None
