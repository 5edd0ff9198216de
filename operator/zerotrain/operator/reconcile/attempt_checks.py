"""The checks before an attempt: a job that they reject gets no pods until its user changes something.

- The spec: fields that are not supported yet, and rules that CEL cannot express.
- spec.network, and the hint on the job's NetworkPolicy after a failed connection.
- requireEncryptedVolume: no pod until the StorageClass declares encryption. A class is read once before the
  job's first attempt under this operator, and again if that was a while ago: parameters of a class never
  change, but it may be deleted and recreated, and annotations change.
- The memory plan, made for the size of the attempt that is about to start.

Privileges beyond Pod Security "restricted" are accepted, and reported in a condition and an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Final

from pydantic import ValidationError

from zerotrain.contract.planner import Fit
from zerotrain.contract.text import one_line
from zerotrain.contract.unreachable import reports_unreachable_host
from zerotrain.operator.api import Phase, ZeroTrainingJobSpec
from zerotrain.operator.api.memory_plan import MemoryPlan
from zerotrain.operator.api.network import is_within
from zerotrain.operator.api.planning import JobPlan, status_of
from zerotrain.operator.api.validation import refusals
from zerotrain.operator.constants import (
    ANNOTATION_ENCRYPTED_VOLUMES,
    ANNOTATION_IGNORE_MEMORY_PLAN,
    LABEL_JOB,
    Reason,
)
from zerotrain.operator.reconcile import next_size, queueing
from zerotrain.operator.reconcile.draft import ACTIVE, Draft, stored
from zerotrain.operator.reconcile.observe import StorageClassView
from zerotrain.operator.reconcile.plan import AskStorageClass

LOOK_AGAIN: Final = timedelta(seconds=60)
"""Time after which a rejected class is read again; also the maximum age of an accepted one before the next
attempt."""

RDMA: Final = (
    "spec.resources.rdma: the workers ask for the capability IPC_LOCK, so that their pods are not Pod "
    'Security "restricted"; no NetworkPolicy applies to traffic over RDMA'
)


def stalls(draft: Draft) -> bool:
    """Return whether the user must change the spec before an attempt of the present size can start."""
    refusal = refusal_of(next_size.admissible(draft)) or next_size.check(draft)
    if refusal is None:
        refusal = does_not_fit(draft)
        if refusal is not None and next_size.give_up_choice(draft):
            # The other size was chosen by the operator, not by the user.
            refusal = next_size.check(draft) or does_not_fit(draft)
    refusal = refusal or egress_refusal(draft) or volume_refusal(draft) or queueing.queue_name_refusal(draft)
    if refusal is None:
        return False
    if draft.status.phase is not Phase.STALLED:
        draft.emit(refusal[0], refusal[1], warning=True)
    draft.set(phase=Phase.STALLED, start_time=None)
    draft.stalled = refusal
    return True


def refusal_of(spec: ZeroTrainingJobSpec) -> tuple[str, str] | None:
    """Return reason and message of a rejected spec, naming every field; None if the job may start."""
    found = refusals(spec)
    if not found:
        return None
    # A wrong value comes before a missing feature: it stays wrong in every version.
    wrong = [item for item in found if item.reason == Reason.INVALID_SPEC]
    first = (wrong or list(found))[0]
    return str(first.reason), one_line("; ".join(f"{item.path}: {item.message}" for item in found))


def unreadable(error: ValidationError) -> tuple[str, str]:
    """Return reason and message for a stored spec that this version's models reject, e.g. after a manual CRD
    change."""
    problems = [
        f"spec.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
    ]
    return str(Reason.INVALID_SPEC), one_line("; ".join(problems))


def report_unreadable(draft: Draft) -> None:
    """Emit one event when the operator stops managing a job because it cannot read the spec."""
    if draft.stalled is None:
        return
    reason, message = draft.stalled
    if all(item.message != stored(message) for item in draft.job.status.conditions):
        draft.emit(reason, message, warning=True)


def egress_refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if the job requests more networks than its installation allows; None
    otherwise."""
    network, bounds = draft.job.spec.network, draft.observed.egress_bounds
    asked = network.egress_cidrs if network is not None else ()
    beyond = [cidr for cidr in asked if not is_within(cidr, bounds)]
    if not beyond:
        return None
    allowed = ", ".join(bounds[:8]) or "none"
    return str(Reason.EGRESS_NOT_ALLOWED), (
        f"spec.network.egressCidrs: {', '.join(beyond[:8])} is not within what this installation allows jobs "
        f"({allowed}). Name parts of that, have the chart's jobs.allowedEgressCidrs widened, or remove the "
        "field and give a NetworkPolicy of your own for pods with the label "
        f"{LABEL_JOB}={draft.job.identity.name}"
    )


def egress_notice(draft: Draft) -> str:
    """Return what an attempt that runs does not get of spec.network, which may be changed at any time; empty
    otherwise."""
    runs = draft.status.phase in ACTIVE and draft.status.attempt > 0
    refusal = egress_refusal(draft) if runs else None
    return f"no other attempt will start: {refusal[1]}" if refusal is not None else ""


def report_egress(draft: Draft) -> None:
    """Emit one event when an attempt begins to run with less than spec.network requests."""
    text = stored(egress_notice(draft))
    if text and all(text not in item.message for item in draft.job.status.conditions):
        draft.emit(Reason.EGRESS_NOT_ALLOWED, text, warning=True)


def egress_hint(draft: Draft, texts: Iterable[str]) -> str | None:
    """Return the hint on the network policy if one of the texts reports an unreachable destination; None
    otherwise."""
    if not any(reports_unreachable_host(text) for text in texts):
        return None
    return f"it could not reach the network: {egress_way_out(draft)}"


def egress_way_out(draft: Draft) -> str:
    """Return what the job's policy allows, and how to allow more."""
    return (
        "the job's NetworkPolicy lets its pods, init containers too, reach "
        "its ranks, DNS and spec.network.egressCidrs alone; name the network there, or add a NetworkPolicy "
        f"of your own for pods with the label {LABEL_JOB}={draft.job.identity.name} (policies add up)"
    )


def awaits_class(draft: Draft, *, max_age: timedelta | None = None) -> bool:
    """Return whether a class must be read first, and request it. Without `max_age` any earlier reading
    suffices."""
    waits = False
    for wanted in _wanted_classes(draft.job.spec):
        view = _class_view(draft, wanted)
        if view is None or (max_age is not None and draft.now - view.at > max_age):
            draft.act(wanted)
            waits = True
    if waits:
        draft.set(phase=draft.status.phase or Phase.PENDING)
    return waits


def volume_refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if a class was read and does not guarantee that its volume is encrypted."""
    for wanted in _wanted_classes(draft.job.spec):
        view = _class_view(draft, wanted)
        if view is None or view.encryption is not None:
            continue
        if draft.is_due(view.at + LOOK_AGAIN):
            draft.act(wanted)
        if view.problem is not None:
            return str(Reason.STORAGE_CLASS_UNKNOWN), _unknown_class_message(wanted, view)
        return str(Reason.VOLUME_NOT_ENCRYPTED), _not_encrypted_message(wanted, view)
    return None


def _not_encrypted_message(wanted: AskStorageClass, view: StorageClassView) -> str:
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


def _unknown_class_message(wanted: AskStorageClass, view: StorageClassView) -> str:
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


def _wanted_classes(spec: ZeroTrainingJobSpec) -> Iterator[AskStorageClass]:
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


def _class_view(draft: Draft, wanted: AskStorageClass) -> StorageClassView | None:
    """Return the answer to this question; None without one."""
    views = draft.observed.storage_classes
    return next((view for view in views if view.answers(wanted.field, wanted.claim, wanted.name)), None)


def does_not_fit(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if no worker could hold its ranks; None if they fit or the planner cannot
    tell. The plan is stored in `status.memoryPlan`."""
    found = _memory_plan(draft)
    refused = found.verdict is Fit.DOES_NOT_FIT
    overridden = refused and draft.job.identity.ignores_memory_plan
    is_new = _write_memory_plan(draft, found, overridden=overridden)
    if refused and not overridden:
        advice = f'To start it anyway, set annotation {ANNOTATION_IGNORE_MEMORY_PLAN}: "true".'
        return str(Reason.DOES_NOT_FIT), " ".join((found.message, *_how_to_change(draft, found), advice))
    if is_new and overridden:
        draft.emit(Reason.MEMORY_PLAN_IGNORED, found.message, warning=True)
    elif is_new and found.verdict is Fit.TIGHT:
        draft.emit(Reason.MEMORY_TIGHT, found.message, warning=True)
    return None


def _how_to_change(draft: Draft, found: JobPlan) -> tuple[str, ...]:
    """Return how to make the proposed changes: the API server rejects some of them for a job that exists."""
    if found.proposal is None:
        return ()
    changes, is_elastic = " and ".join(found.proposal.changes), draft.job.spec.elastic is not None
    if "spec.nvme" in changes or ("spec.workers" in changes and not is_elastic):
        return ("Delete the job and apply it again with these changes: they are not possible in place.",)
    if any("spec.workers" not in change for change in found.proposal.changes):
        return ("spec.config can be changed while spec.suspend is true.",)
    return ()


def _memory_plan(draft: Draft) -> JobPlan:
    spec, elastic = draft.job.spec, draft.status.elastic
    if spec.elastic is None:
        return draft.plan_job(spec)
    base_workers = elastic.base_workers if elastic is not None else spec.workers
    return draft.plan_job(spec, workers=next_size.next_workers(draft), base_workers=base_workers)


def _write_memory_plan(draft: Draft, found: JobPlan, *, overridden: bool) -> bool:
    """Store the plan, and return whether it differs from the previous one."""
    old: MemoryPlan | None = draft.status.memory_plan
    bare = status_of(found)
    changes = {"message": stored(bare.message), "overridden": True if overridden else None}
    plan = bare.model_copy(update=changes)
    if old is not None and old.model_copy(update={"observed": None}) == plan:
        return False
    draft.set(memory_plan=plan)
    return True


def privileges_message(draft: Draft) -> str:
    """Return the text of the condition; empty for a job without extra privileges."""
    resources = draft.job.spec.resources
    return RDMA if resources is not None and resources.rdma is not None else ""


def report_privileges(draft: Draft) -> None:
    """Emit one event with the first attempt; resources are immutable, so it is not repeated."""
    if draft.status.attempt == 1 and (text := privileges_message(draft)):
        draft.emit(Reason.IPC_LOCK_ADDED, text, warning=True)
