"""Taking pods away: with one request per attempt, without waiting for nodes that do not answer.

The pod of the rank that failed goes last: its log is read before, while its peers are already on their way.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.reconcile import logs
from zerotrain.operator.reconcile.attempts import AttemptView, strays
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.nodes import Loss
from zerotrain.operator.reconcile.observe import PodView
from zerotrain.operator.reconcile.plan import DeletePods, DeleteWorkers
from zerotrain.operator.reconcile.stuck import tell_held

KILL_GRACE_S = 1
"""For ranks whose peers are gone: their work since the last checkpoint is lost either way."""

SIDECARS_END = timedelta(seconds=60)
"""For what runs beside a worker that has ended; Kubernetes itself ends sidecars that it knows to be such."""

LATE_CREATIONS = timedelta(seconds=2)
"""A request that its sender did not live to see answered may wait in the API server for so long."""


def end_workers(draft: Draft, *, grace_s: int) -> bool:
    """Ask for the end of every pod up to the current attempt; True once none exists any more."""
    attempt = draft.status.attempt
    pods = [pod for pod in draft.observed.pods if pod.attempt <= attempt]
    for number in sorted({pod.attempt for pod in pods}):
        _end(draft, number, [pod for pod in pods if pod.attempt == number], grace_s)
    return not pods and not _may_appear(draft)


def _may_appear(draft: Draft) -> bool:
    """Whether a creation that an operator before this one asked for may still be carried out."""
    synced = draft.observed.synced_at
    if draft.status.pods_created or draft.status.attempt == 0 or synced is None:
        return False
    if draft.now < synced + LATE_CREATIONS:
        draft.wake(synced + LATE_CREATIONS)
        return True
    return False


def end_strays(draft: Draft) -> None:
    """Pods of earlier attempts, and of indices that the job no longer has."""
    attempt, workers = draft.status.attempt, draft.size
    for number, pods in strays(attempt, workers, draft.observed).items():
        if number < attempt:
            _end(draft, number, list(pods), KILL_GRACE_S)
        else:
            _delete(draft, [pod for pod in pods if pod.deletion_at is None], KILL_GRACE_S)


def end_live_workers(draft: Draft, view: AttemptView, *, grace_s: int) -> None:
    """End what still runs and keep the ended pods, whose logs people want to read."""
    # Also one that counts as lost because its node does not let it go.
    live = [pod for pod in view.present if not pod.ended or _lingers(draft, pod)]
    due = [pod for pod in live if _needs_deletion(pod, grace_s)]
    spared = logs.unsaved(draft) if due else None
    _delete(draft, [pod for pod in due if spared is None or pod.uid != spared.uid], grace_s)
    if spared is not None and spared in due:
        logs.save(draft)
        _delete(draft, [spared], grace_s)
    _force_stuck(draft, live)


def _lingers(draft: Draft, pod: PodView) -> bool:
    """Whether what runs beside a worker that has ended had time enough to end by itself."""
    if not pod.lingers or pod.ended_seen_at is None:
        return False
    due = pod.ended_seen_at + SIDECARS_END
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due


def _end(draft: Draft, number: int, pods: list[PodView], grace_s: int) -> None:
    due = [pod for pod in pods if _needs_deletion(pod, grace_s)]
    spared = logs.unsaved(draft) if due and number == draft.status.attempt else None
    if any(spared is None or pod.uid != spared.uid for pod in due):
        index = spared.index if spared is not None else None
        draft.act(DeleteWorkers(attempt=number, grace_s=grace_s, spared=index))
    if spared is not None and spared in due:
        logs.save(draft)
        _delete(draft, [spared], grace_s)
    if due:
        # Looks again although the deletions bring events of their own: one of them may never come.
        draft.wake(draft.now + timedelta(seconds=grace_s) + _timeout(draft))
    _force_stuck(draft, pods)


def _force_stuck(draft: Draft, pods: list[PodView]) -> None:
    """Remove at once what is past its time, or ran on a node that nothing comes back from."""
    stuck, lost = [], draft.losses()
    for pod in pods:
        if lost.get(pod.node or "") is Loss.FINAL:
            stuck.append(pod)
            continue
        if pod.deletion_at is None:
            continue
        due = pod.deletion_at + _timeout(draft)
        if draft.now >= due:
            stuck.append(pod)
        else:
            draft.wake(due)
    tell_held(draft, pods)
    _delete(draft, stuck, 0)


def _delete(draft: Draft, pods: list[PodView], grace_s: int) -> None:
    if pods:
        draft.act(DeletePods(names_uids=tuple((pod.name, pod.uid) for pod in pods), grace_s=grace_s))


def _needs_deletion(pod: PodView, grace_s: int) -> bool:
    if pod.deletion_at is None:
        return True
    # Somebody asked for a longer farewell than this end leaves time for.
    return not pod.ended and pod.deletion_grace_s is not None and pod.deletion_grace_s > grace_s


def _timeout(draft: Draft) -> timedelta:
    return timedelta(seconds=draft.job.spec.run_policy.termination_timeout_seconds)
