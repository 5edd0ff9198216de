"""Waiting for admission: queues, and which pod group the cluster takes.

In this order, before every attempt: Kueue admits the job (`queue_name`), then the gang mechanism
is found. What was decided goes into the shape of the attempt. Kueue's admission outlives an attempt: a
restart after a failure does not queue again.
"""

from __future__ import annotations

from datetime import timedelta

from zerotrain.operator.api import AttemptShape, Phase
from zerotrain.operator.api.lifecycle import CleanPodPolicy
from zerotrain.operator.api.scheduling import Gang, Scheduling
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile import exclusions
from zerotrain.operator.reconcile.attempts import AttemptView
from zerotrain.operator.reconcile.draft import Draft
from zerotrain.operator.reconcile.plan import AskQueue, DiscoverApis
from zerotrain.operator.reconcile.queue_name import queue_name
from zerotrain.operator.reconcile.queues import QueueStep, QueueView
from zerotrain.operator.resources.gang import GROUPS, has_group
from zerotrain.operator.resources.kueue import made_from

REDISCOVER = timedelta(seconds=10)
"""An API that was missing is looked for again after so long."""

_IDLE = frozenset({Phase.SUSPENDED, Phase.STALLED, Phase.COMPLETED, Phase.FAILED})
"""Phases whose pods, if any are left, have ended or are about to."""

LISTED_AGAIN = timedelta(seconds=2)
"""Until the Workloads are listed a job looks so often whether they are."""

_ORDER = (Gang.NATIVE, Gang.VOLCANO, Gang.COSCHEDULING)


def hold(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    """Reason and message of what the next attempt waits for; None when it may start. Asks for the objects
    that make it move."""
    if queue_name(draft) is not None and (waits := _queue(draft, shape)) is not None:
        return waits
    return _gang_api(draft, shape)


def shaped(draft: Draft, shape: AttemptShape) -> AttemptShape:
    """The shape with what admission decided: the gang's API, the queue's nodes."""
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
    """Who let the next attempt in, for the event."""
    queue, name = draft.observed.queue, queue_name(draft)
    gang = _gang(draft, shape)
    if name is not None and queue is not None:
        told = f"admitted by queue {name} (ClusterQueue {queue.cluster_queue})"
    elif has_group(gang):
        told = f"all workers or none are placed by a PodGroup of {gang}"
    else:
        told = "the scheduler places each worker"
    return f"attempt {draft.status.attempt + 1} starts: {told}"


def evicted(draft: Draft, view: AttemptView) -> str | None:
    """Why the running attempt has to give its resources back; None when it may go on."""
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
    """In every pass, after the phase: tell the queue how far the job is."""
    step, queue = _next_step(draft), draft.observed.queue
    if step is QueueStep.RELEASE and queue is not None:
        draft.act(AskQueue(step=step, message=queue.evicted or ""))
    elif step is not None:
        draft.act(AskQueue(step=step, workers=draft.size, message=f"the job is {draft.status.phase}"))


def in_queue(draft: Draft) -> bool:
    """Whether a queue decides how much room the job may have."""
    return queue_name(draft) is not None


def waits_in_queue(draft: Draft) -> bool:
    """Whether the queue has not let the job in, or wants it out: such time is not the job's own."""
    queue = draft.observed.queue
    return in_queue(draft) and queue is not None and not (queue.admitted and queue.evicted is None)


def _scheduling(draft: Draft) -> Scheduling:
    return draft.job.spec.scheduling or Scheduling()


def _queue(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    name, queue = queue_name(draft), draft.observed.queue
    apis = draft.observed.apis
    if apis is None or (apis.kueue is None and _look_again(draft)):
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
        off = exclusions.current(draft)
        draft.act(
            AskQueue(step=QueueStep.CREATE, workers=shape.workers, excluded_nodes=off, queue=name or "")
        )
    elif queue.finished or _is_of_others(draft, shape, queue) or _is_outdated(draft, queue):
        # Its pods and its priority cannot be changed: a job of other pods or another priority queues anew.
        draft.act(AskQueue(step=QueueStep.DELETE))
    elif queue.evicted is not None:
        if queue.holds_quota:
            draft.act(AskQueue(step=QueueStep.RELEASE, message=queue.evicted))
        elif queue.message not in queue.evicted:
            # Before Kueue looks at the job again, the message is the eviction's.
            return Reason.QUEUED, f"waits for queue {name}: {queue.message} (evicted: {queue.evicted})"
        return Reason.QUEUE_EVICTED, f"evicted by queue {name}: {queue.evicted}"
    elif queue.problem is not None:
        return Reason.QUEUED, f"admitted by queue {name}, but {queue.problem}"
    elif queue.admitted:
        return None
    said = f": {queue.message}" if queue.message else ""
    return Reason.QUEUED, f"waits for queue {name}{said}"


def _is_of_others(draft: Draft, shape: AttemptShape, queue: QueueView) -> bool:
    """Whether the Workload stands in another queue, or for other pods than the next attempt has. The spec of
    pods is edited under a suspension, and one that ends while the ranks still yield deletes no Workload."""
    if queue.workers != shape.workers or queue.queue != queue_name(draft):
        return True
    return queue.made_from not in ("", made_from(draft.job.spec))


def _is_outdated(draft: Draft, queue: QueueView) -> bool:
    """Whether the queue decides on what is not so any more: it has chosen a node that the job keeps off by
    now, or has the job wait with another priority than its spec's, or for others than a node that is back."""
    off = frozenset(exclusions.current(draft))
    if queue.holds_quota:
        return bool(queue.gates) and not off <= queue.excluded_nodes
    exclusions.wake_at_next_end(draft)
    outranked = queue.priority_class != (_scheduling(draft).priority_class_name or "")
    return outranked or not queue.excluded_nodes <= off


def _gang_api(draft: Draft, shape: AttemptShape) -> tuple[str, str] | None:
    """Until it is known which pod group the cluster takes."""
    wish, apis = _scheduling(draft).gang, draft.observed.apis
    if wish not in GROUPS and not (wish is Gang.AUTO and shape.workers > 1):
        return None
    missing = apis is not None and wish in GROUPS and wish not in apis.gangs
    if apis is None or (missing and _look_again(draft)):
        draft.act(DiscoverApis())
    if apis is None:
        return Reason.QUEUED, "looking for gang schedulers"
    if missing and wish is not None:
        return (
            Reason.GANG_MISSING,
            f"the cluster serves no pod groups of {GROUPS[wish]} that this version can write: install that "
            "scheduler, or choose another spec.scheduling.gang while the job is suspended",
        )
    return None


def _gang(draft: Draft, shape: AttemptShape) -> str:
    """As the shape keeps it; call it only when `_gang_api` holds nothing up."""
    apis = draft.observed.apis
    wish, found = _scheduling(draft).gang, apis.gangs if apis is not None else {}
    if wish is Gang.AUTO and shape.workers > 1:
        return next((found[gang] for gang in _ORDER if gang in found), "")
    return found.get(wish, "") if wish in GROUPS else ""


def _look_again(draft: Draft) -> bool:
    apis = draft.observed.apis
    if apis is None:
        return True
    due = apis.at + REDISCOVER
    if draft.now < due:
        draft.wake(due)
    return draft.now >= due


def _next_step(draft: Draft) -> QueueStep | None:
    """What the queue has not been told yet. Before an attempt, `hold` speaks with it."""
    phase, queue = draft.status.phase, draft.observed.queue
    if not in_queue(draft):
        # Its name was taken out of the spec: quota is kept no longer than pods may use it.
        left = queue is not None and queue.exists
        idle = phase in _IDLE or not draft.observed.pods
        return QueueStep.DELETE if left and idle else None
    if phase is Phase.QUEUED:
        return None
    if queue is None:
        return None if draft.observed.follows_queues else QueueStep.FOLLOW
    if not queue.exists or queue.finished:
        return None
    if phase in (Phase.SUSPENDED, Phase.STALLED):
        return QueueStep.DELETE
    if phase in (Phase.COMPLETED, Phase.FAILED):
        # Pods on their way out still use what the next job in line would be let in for.
        policy = draft.job.spec.run_policy.clean_pod_policy
        go = phase is Phase.FAILED or policy is not CleanPodPolicy.NONE
        over = all(pod.is_over for pod in draft.observed.pods)
        return None if go and not over else QueueStep.FINISH
    if phase is Phase.RESTARTING and queue.evicted and queue.holds_quota and not draft.observed.pods:
        return QueueStep.RELEASE  # the hold-off is no reason to keep others waiting
    if phase is Phase.RUNNING and not queue.pods_ready:
        return QueueStep.PODS_READY
    if phase in (Phase.PENDING, Phase.STARTING, Phase.RESTARTING) and queue.pods_ready:
        return QueueStep.PODS_NOT_READY
    return None
