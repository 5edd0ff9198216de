"""Deletion of pods: with one request per attempt, without waiting for nodes that do not answer.

The pod of the failed rank is deleted last: its log is read first, while its peers are already being deleted.
A pod that its finalizers keep, though its containers have ended, is reported.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import records
from zerotrain.operator.reconcile.attempts import AttemptView, strays
from zerotrain.operator.reconcile.draft import ACTIVE, FINISHED, Draft
from zerotrain.operator.reconcile.nodes import Loss
from zerotrain.operator.reconcile.plan import DeletePods, DeleteWorkers
from zerotrain.operator.reconcile.pods import PodView
from zerotrain.operator.reconcile.start_up import report_first

KILL_GRACE_S = 1
"""Grace period in seconds of ranks whose peers are gone: their work since the last checkpoint is lost in any
case."""

SIDECARS_END = timedelta(seconds=60)
"""Time that other containers may outlive a worker that has ended. Kubernetes itself ends native sidecars."""

LATE_CREATIONS = timedelta(seconds=2)
"""Time for which the API server may still hold a request whose sender ended before the response."""


def end_workers(draft: Draft, *, grace_s: int) -> bool:
    """Request the deletion of every pod up to the current attempt; return True once none exists any more."""
    attempt = draft.status.attempt
    pods = [pod for pod in draft.observed.pods if pod.attempt <= attempt]
    for number in sorted({pod.attempt for pod in pods}):
        _end(draft, number, [pod for pod in pods if pod.attempt == number], grace_s)
    return not pods and not _may_appear(draft)


def _may_appear(draft: Draft) -> bool:
    """Return whether a creation that a previous operator requested may still be carried out."""
    synced = draft.observed.synced_at
    if draft.status.pods_created or draft.status.attempt == 0 or synced is None:
        return False
    return not draft.is_due(synced + LATE_CREATIONS)


def end_strays(draft: Draft) -> None:
    """Request the deletion of pods of earlier attempts, and of indices that the job no longer has.

    A pod whose creation request got no response may appear even after the job's end.
    """
    phase, policy = draft.status.phase, draft.job.spec.run_policy.clean_pod_policy
    if phase not in ACTIVE and (phase not in FINISHED or policy is CleanPodPolicy.ALL):
        return  # in other phases all pods are deleted
    attempt, workers = draft.status.attempt, draft.workers
    for number, pods in strays(attempt, workers, draft.observed).items():
        if number < attempt:
            _end(draft, number, list(pods), KILL_GRACE_S)
        else:
            delete_pods(draft, [pod for pod in pods if pod.deletion_at is None], KILL_GRACE_S)


def end_live_workers(draft: Draft, view: AttemptView, *, grace_s: int) -> None:
    """End what still runs and keep the ended pods, whose logs users want to read."""
    # This includes a pod that counts as lost because its node does not finish its deletion.
    live = [pod for pod in view.present if not pod.ended or _lingers(draft, pod)]
    due = [pod for pod in live if _needs_deletion(pod, grace_s)]
    spared = records.unsaved_log(draft) if due else None
    delete_pods(draft, [pod for pod in due if spared is None or pod.uid != spared.uid], grace_s)
    if spared is not None and spared in due:
        records.save_log(draft)
        delete_pods(draft, [spared], grace_s)
    _force_stuck(draft, live)


def _lingers(draft: Draft, pod: PodView) -> bool:
    """Return whether containers next to a worker that has ended had enough time to end by themselves."""
    if not pod.lingers or pod.ended_seen_at is None:
        return False
    return draft.is_due(pod.ended_seen_at + SIDECARS_END)


def _end(draft: Draft, number: int, pods: list[PodView], grace_s: int) -> None:
    due = [pod for pod in pods if _needs_deletion(pod, grace_s)]
    spared = records.unsaved_log(draft) if due and number == draft.status.attempt else None
    if any(spared is None or pod.uid != spared.uid for pod in due):
        index = spared.index if spared is not None else None
        draft.act(DeleteWorkers(attempt=number, grace_s=grace_s, spared=index))
    if spared is not None and spared in due:
        records.save_log(draft)
        delete_pods(draft, [spared], grace_s)
    if due:
        # Another pass is scheduled although the deletions cause events of their own: one of them may never
        # come.
        draft.wake(draft.now + timedelta(seconds=grace_s) + draft.termination_timeout)
    _force_stuck(draft, pods)


def _force_stuck(draft: Draft, pods: list[PodView]) -> None:
    """Remove at once pods that are past their time, or on a node that will not come back."""
    stuck, lost = [], draft.losses()
    for pod in pods:
        due = pod.deletion_at + draft.termination_timeout if pod.deletion_at is not None else None
        if lost.get(pod.node or "") is Loss.FINAL or (due is not None and draft.is_due(due)):
            stuck.append(pod)
    report_held(draft, pods)
    delete_pods(draft, stuck, 0)


def delete_pods(draft: Draft, pods: list[PodView], grace_s: int) -> None:
    """Request the deletion of these pods one by one, unless it was forced before: then only finalizers keep a
    pod, and another request changes nothing."""
    if due := [pod for pod in pods if pod.deletion_grace_s != 0]:
        draft.act(DeletePods(names_uids=tuple((pod.name, pod.uid) for pod in due), grace_s=grace_s))


def _needs_deletion(pod: PodView, grace_s: int) -> bool:
    if pod.deletion_at is None:
        return True
    # Another client requested a longer grace period than this deletion allows.
    return not pod.ended and pod.deletion_grace_s is not None and pod.deletion_grace_s > grace_s


def held_by_finalizers(draft: Draft, pod: PodView) -> str | None:
    """Return the finalizers that keep the pod, if nothing else does; None otherwise."""
    due = _held_from(draft, pod)
    if due is None or draft.now < due:
        return None
    names = ", ".join(pod.finalizers)
    return (
        f"pod {pod.name} cannot be removed: finalizer {names} holds it; no other attempt starts until the "
        "finalizer's owner removes that"
    )


def first_held(draft: Draft) -> str | None:
    """Return the text of `held_by_finalizers` for the first such pod, with the number of further ones; None
    without one."""
    found = [text for pod in draft.observed.pods if (text := held_by_finalizers(draft, pod)) is not None]
    more = f" (and {len(found) - 1} more pods)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else None


def report_held(draft: Draft, pods: list[PodView]) -> None:
    """Emit one event when finalizers begin to hold a pod."""
    for pod in pods:
        due = _held_from(draft, pod)
        if due is not None and due > draft.now:
            draft.wake(due)
    report_first(draft, pods, Reason.POD_HELD, lambda pod: held_by_finalizers(draft, pod))


def _held_from(draft: Draft, pod: PodView) -> datetime | None:
    if not pod.finalizers or pod.deletion_at is None:
        return None
    return pod.deletion_at if pod.is_over else pod.deletion_at + draft.termination_timeout
