"""Completion of an attempt, even if the ends of some workers were not observed.

A pod that is deleted while no operator runs takes its exit code with it. What remains is what was recorded
before (`status.checkpoint`, updated as soon as a rank reports it) and what the remaining pods say. Only
reports of the built-in trainer count: what a user program still has to do after a checkpoint, or on another
rank, is not known.

For a user program that was asked to stop, an exit code 0 may mean "done" or "stopped": many programs end so
on SIGTERM. It counts as stopped, as in a Kubernetes Job: a program that is done ends with 0 once more. This
module covers the operator's own stop request; a deletion or a disruption leads to `WorkerState.STOPPED`.
"""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import MAX_CLOCK_LAG, AttemptView, WorkerState
from zerotrain.operator.reconcile.draft import Draft

_SURE = frozenset({WorkerState.SUCCEEDED})
_UNLESS_PROVEN = frozenset({WorkerState.SUCCEEDED, WorkerState.LOST})


def is_done(draft: Draft, view: AttemptView) -> bool:
    """Return whether the job is complete. It is not if one worker failed, yielded or still runs."""
    if view.all_in(_SURE):
        return not _may_be_an_answer(draft, view)
    return view.all_in(_UNLESS_PROVEN) and _all_steps_are_done(draft, view)


def _may_be_an_answer(draft: Draft, view: AttemptView) -> bool:
    """Return whether some worker ended with 0 because it was asked to stop.

    One such worker is enough, because it would have continued with the others.
    """
    asked, state = draft.status.checkpoint.requested_at, draft.observed.yielding
    if asked is None or not draft.job.spec.command:
        return False
    if state is not None and state.attempt == view.number and state.acked_at is not None:
        return True
    # The answer may be lost, or only in the memory of a previous operator. Then the times decide, one of
    # which comes from the node's clock.
    since = asked - MAX_CLOCK_LAG
    pods = [worker.pod for worker in view.workers if worker.pod is not None]
    return any(pod.deletion_at or pod.finished_at is None or pod.finished_at >= since for pod in pods)


def _all_steps_are_done(draft: Draft, view: AttemptView) -> bool:
    spec, status = draft.job.spec, draft.status
    if spec.command or spec.steps is None:
        return False
    if spec.checkpoint is not None:
        # All ranks write the checkpoint together, and none is written for a training whose result is
        # rejected. A checkpoint of another attempt may be the one that this attempt found damaged.
        last = status.checkpoint.last
        return last is not None and last.durable and last.attempt == view.number and last.step >= spec.steps
    # Nothing is kept of such a job. It is done when all ranks made the last step, which ends in an exchange
    # between all of them. The exit code of any rank says that the loss was accepted as well.
    ends = [
        worker.pod.termination
        for worker in view.workers
        if worker.state is WorkerState.SUCCEEDED and worker.pod is not None
    ]
    return any(end is not None and end.step >= spec.steps for end in ends)


def unseen_ends_message(view: AttemptView) -> str:
    """Return the part of the event's message that names the workers whose end was not observed; empty without
    one."""
    unseen = view.indices(WorkerState.LOST)
    if not unseen:
        return ""
    names = f"{', '.join(str(index) for index in unseen[:5])}{', ...' if len(unseen) > 5 else ''}"
    return f"; the pods of workers {names} ended unobserved, but the last step was made and all work was done"
