"""Admission of an attempt: by a Kueue queue, and by the pod group that the cluster supports.

Before every attempt, Kueue admits the job first, then the gang mechanism is determined. The result is stored
in the shape of the attempt. Kueue's admission outlives an attempt: a restart after a failure does not queue
again.

The queue is named by `spec.scheduling.queueName`, or by the label that Kueue's own jobs use. The schema lets
the field change only while the job is suspended, but its rules do not cover labels. So an active job keeps
the queue that its label named at the start, in status, until it is suspended.
"""

from __future__ import annotations

import re
from datetime import timedelta

from zerotrain.operator.api import AttemptShape, Phase
from zerotrain.operator.api.base import DNS_LABEL
from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.api.scheduling import Gang, Scheduling
from zerotrain.operator.constants import QUEUE_LABEL, Reason
from zerotrain.operator.reconcile import avoided_nodes
from zerotrain.operator.reconcile.draft import FINISHED, Draft
from zerotrain.operator.reconcile.observe import QueueView
from zerotrain.operator.reconcile.plan import AskQueue, DiscoverApis, QueueStep
from zerotrain.operator.resources.gang import GROUPS, has_group
from zerotrain.operator.resources.kueue import made_from

_AT_REST = frozenset({Phase.SUSPENDED, Phase.STALLED})

_ON_ITS_WAY = frozenset(
    {Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.YIELDING, Phase.SUSPENDING}
)
"""Phases in which a changed label takes effect at the next suspension."""

_DNS_LABEL = re.compile(DNS_LABEL)

_MAX_NAME_CHARS = 63

REDISCOVER = timedelta(seconds=10)
"""Interval of the discovery for an API that was missing."""

LISTED_AGAIN = timedelta(seconds=2)
"""Interval at which a job checks whether the Workloads have been listed."""

_ORDER = (Gang.NATIVE, Gang.VOLCANO, Gang.COSCHEDULING)


def queue_name(draft: Draft) -> str | None:
    """Return the name of the queue that admits the job; None without one."""
    return _queue_field(draft) or draft.status.queue_name


def take_label(draft: Draft) -> None:
    """Store the queue that the label names, at the start of a pass.

    A job that has not begun, or is suspended, takes the label's queue. For an active job the change is stored
    for later and reported once.
    """
    label, field, status = _queue_label(draft), _queue_field(draft), draft.status
    if status.attempt == 0 or status.phase in _AT_REST:
        taken = None if field is not None else label
        if (status.queue_name, status.next_queue_name) != (taken, None):
            draft.set(queue_name=taken, next_queue_name=None)
        return
    if status.phase not in _ON_ITS_WAY:
        return
    now = queue_name(draft)
    asked = label or ("" if field is None else field)
    changed = None if asked == (now or "") else asked
    if changed == status.next_queue_name:
        return
    draft.set(next_queue_name=changed)
    if changed is not None:
        draft.emit(
            Reason.QUEUE_CHANGED,
            f"label {QUEUE_LABEL}: {_shown_queue(changed)} counts from the next suspension of the job; until "
            f"then it is in {_shown_queue(now or '')}",
        )


def queue_name_refusal(draft: Draft) -> tuple[str, str] | None:
    """Return reason and message if no attempt may start; None if label and field agree.

    A change that waits for a suspension is no disagreement.
    """
    label, field = _queue_label(draft), _queue_field(draft)
    if label is None or draft.status.next_queue_name is not None:
        return None
    if field is not None and field != label:
        return (
            Reason.INVALID_SPEC,
            f"spec.scheduling.queueName is {field!r} and label {QUEUE_LABEL} is {label!r}: both name the "
            "job's queue, so they must be equal; remove one of them",
        )
    if not _DNS_LABEL.fullmatch(label) or len(label) > _MAX_NAME_CHARS:
        return (
            Reason.INVALID_SPEC,
            f"label {QUEUE_LABEL} is {label!r}, which no LocalQueue can be called; give lower-case letters, "
            "digits and dashes",
        )
    return None


def hold(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    """Return reason and message of what the next attempt waits for; None if it may start.

    It also requests the objects that the admission needs.
    """
    if queue_name(draft) is not None and (waits := _hold_by_queue(draft, shape)) is not None:
        return waits
    return _gang_api(draft, shape)


def shaped(draft: Draft, shape: AttemptShape) -> AttemptShape:
    """Return the shape with the results of admission: the gang's API, and the queue's nodes."""
    updates: dict[str, object] = {"gang": _gang(draft, shape)}
    queue = draft.observed.queue
    if in_queue(draft) and queue is not None:
        updates |= {
            "node_selector": dict(queue.node_selector),
            "tolerations": queue.tolerations,
            "scheduling_gates": queue.gates,
            "labels": dict(queue.labels),
            "annotations": dict(queue.annotations),
        }
    return shape.model_copy(update=updates)


def admission(draft: Draft, shape: AttemptShape) -> str:
    """Return the text of the event on what admitted the next attempt."""
    queue, name = draft.observed.queue, queue_name(draft)
    gang = _gang(draft, shape)
    if name is not None and queue is not None:
        message = f"admitted by queue {name} (ClusterQueue {queue.cluster_queue})"
    elif has_group(gang):
        message = f"all workers or none are placed by a PodGroup of {gang}"
    else:
        message = "the scheduler places each worker"
    return f"attempt {draft.status.attempt + 1} starts: {message}"


def evicted(draft: Draft) -> str | None:
    """Return why the running attempt has to release its resources; None if it may continue."""
    queue = draft.observed.queue
    if queue_name(draft) is None or queue is None:
        return None
    if queue.evicted is not None:
        return f"evicted by the queue: {queue.evicted}"
    if not queue.exists:
        return "its Workload was deleted"
    if not queue.admitted:
        return "its Workload is not admitted any more"
    return None


def settle(draft: Draft) -> None:
    """Report the job's state to the queue. It is called in every pass, after the phase."""
    step, queue = _next_step(draft), draft.observed.queue
    if step is QueueStep.DELETE and queue is not None and queue.deleting:
        return  # Kueue's finalizer keeps it until Kueue is done; another request changes nothing
    if step is QueueStep.RELEASE and queue is not None:
        draft.act(AskQueue(step=step, message=queue.evicted or ""))
    elif step is not None:
        draft.act(AskQueue(step=step, workers=draft.workers, message=f"the job is {draft.status.phase}"))


def in_queue(draft: Draft) -> bool:
    """Return whether a queue decides on the resources of the job."""
    return queue_name(draft) is not None


def waits_in_queue(draft: Draft) -> bool:
    """Return whether the queue has not admitted the job, or evicts it; such time is not active time."""
    queue = draft.observed.queue
    return in_queue(draft) and queue is not None and not (queue.admitted and queue.evicted is None)


def _scheduling(draft: Draft) -> Scheduling:
    return draft.job.spec.scheduling or Scheduling()


def _hold_by_queue(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    name, queue = queue_name(draft), draft.observed.queue
    apis = draft.observed.apis
    if apis is None or (apis.kueue is None and draft.is_due(apis.at + REDISCOVER)):
        draft.act(DiscoverApis())
    if apis is None:
        return Reason.QUEUED, "looking for Kueue"
    if apis.kueue is None:
        return (
            Reason.QUEUE_MISSING,
            "the cluster serves no kueue.x-k8s.io workloads: install Kueue, or remove "
            "the queue's name (spec.scheduling.queueName or the label) while the job is suspended",
        )
    if queue is None:
        if not draft.observed.follows_queues:
            draft.act(AskQueue(step=QueueStep.FOLLOW))
        draft.wake(draft.now + LISTED_AGAIN)
        return Reason.QUEUED, f"asking queue {name}"
    if not queue.exists:
        off = avoided_nodes.current_exclusions(draft)
        draft.act(
            AskQueue(step=QueueStep.CREATE, workers=shape.workers, excluded_nodes=off, queue=name or "")
        )
    elif queue.finished or _is_of_others(draft, shape, queue) or _is_outdated(draft, queue):
        # Pods and priority of a Workload cannot be changed: a job with other pods or another priority queues
        # anew.
        if not queue.deleting:
            draft.act(AskQueue(step=QueueStep.DELETE))
    elif queue.evicted is not None:
        if queue.holds_quota:
            draft.act(AskQueue(step=QueueStep.RELEASE, message=queue.evicted))
        elif queue.message not in queue.evicted:
            # Until Kueue looks at the job again, the message is that of the eviction.
            return Reason.QUEUED, f"waits for queue {name}: {queue.message} (evicted: {queue.evicted})"
        return Reason.QUEUE_EVICTED, f"evicted by queue {name}: {queue.evicted}"
    elif queue.problem is not None:
        return Reason.QUEUED, f"admitted by queue {name}, but {queue.problem}"
    elif queue.admitted:
        return None
    reason = f": {queue.message}" if queue.message else ""
    return Reason.QUEUED, f"waits for queue {name}{reason}"


def _is_of_others(draft: Draft, shape: AttemptShape, queue: QueueView) -> bool:
    """Return whether the Workload is in another queue, or describes other pods than those of the next
    attempt.

    The spec of pods may be edited during a suspension, and a suspension that ends while the ranks still yield
    deletes no Workload.
    """
    if queue.workers != shape.workers or queue.queue != queue_name(draft):
        return True
    return queue.made_from not in ("", made_from(draft.job.spec))


def _is_outdated(draft: Draft, queue: QueueView) -> bool:
    """Return whether the queue's decision is outdated.

    It may have chosen a node that the job now avoids, or queue the job with another priority than the spec's,
    or avoid a node whose exclusion is over.
    """
    off = frozenset(avoided_nodes.current_exclusions(draft))
    if queue.holds_quota:
        return bool(queue.gates) and not off <= queue.excluded_nodes
    avoided_nodes.wake_at_next_exclusion_end(draft)
    outranked = queue.priority_class != (_scheduling(draft).priority_class_name or "")
    return outranked or not queue.excluded_nodes <= off


def _gang_api(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    """Return reason and message while the pod group API of the cluster is not known; None once it is."""
    gang, apis = _scheduling(draft).gang, draft.observed.apis
    if gang not in GROUPS and not (gang is Gang.AUTO and shape.workers > 1):
        return None
    missing = apis is not None and gang in GROUPS and gang not in apis.gangs
    if apis is None or (missing and draft.is_due(apis.at + REDISCOVER)):
        draft.act(DiscoverApis())
    if apis is None:
        return Reason.QUEUED, "looking for gang schedulers"
    if missing and gang is not None:
        return (
            Reason.GANG_MISSING,
            f"the cluster serves no pod groups of {GROUPS[gang]} that this version can write: install that "
            "scheduler, or choose another spec.scheduling.gang while the job is suspended",
        )
    return None


def _gang(draft: Draft, shape: AttemptShape) -> str:
    """Return the gang for the shape; call it only if `_gang_api` returned None."""
    apis = draft.observed.apis
    gang, found = _scheduling(draft).gang, apis.gangs if apis is not None else {}
    if gang is Gang.AUTO and shape.workers > 1:
        return next((found[gang] for gang in _ORDER if gang in found), "")
    return found.get(gang, "") if gang in GROUPS else ""


def _next_step(draft: Draft) -> QueueStep | None:
    """Return the next step of the Workload that is due; None if none is. Before an attempt, `hold` takes the
    steps."""
    phase, queue = draft.status.phase, draft.observed.queue
    if not in_queue(draft):
        # The queue's name was removed from the spec: quota is kept only while pods may use it.
        left = queue is not None and queue.exists
        # In these phases the pods that are left, if any, have ended or are about to.
        idle = phase in _AT_REST | FINISHED or not draft.observed.pods
        return QueueStep.DELETE if left and idle else None
    if phase is Phase.QUEUED:
        return None
    if queue is None:
        return None if draft.observed.follows_queues else QueueStep.FOLLOW
    if not queue.exists or queue.finished:
        return None
    if phase in _AT_REST:
        return QueueStep.DELETE
    if phase in FINISHED:
        # Pods that are being deleted still use what the next job in the queue would be admitted for.
        policy = draft.job.spec.run_policy.clean_pod_policy
        go = phase is Phase.FAILED or policy is not CleanPodPolicy.NONE
        over = all(pod.is_over for pod in draft.observed.pods)
        return None if go and not over else QueueStep.FINISH
    if phase is Phase.RESTARTING and queue.evicted and queue.holds_quota and not draft.observed.pods:
        return QueueStep.RELEASE  # other jobs must not wait for the hold-off
    if phase is Phase.RUNNING and not queue.pods_ready:
        return QueueStep.PODS_READY
    if phase in (Phase.PENDING, Phase.STARTING, Phase.RESTARTING) and queue.pods_ready:
        return QueueStep.PODS_NOT_READY
    return None


def _queue_field(draft: Draft) -> str | None:
    return _scheduling(draft).queue_name


def _queue_label(draft: Draft) -> str | None:
    return draft.job.identity.queue_label or None


def _shown_queue(name: str) -> str:
    return f"queue {name}" if name else "no queue"
