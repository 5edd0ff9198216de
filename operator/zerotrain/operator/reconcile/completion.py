"""Whether an attempt did all that the job is there for, also where nobody saw how some workers ended.

A pod that is deleted while no operator looks takes its exit code along. What is left is what was written
down before (`status.checkpoint`, taken in as soon as a rank tells of it) and what the pods that are still
there say. Only the built-in trainer's word counts: what a program of the user's own has left to do after a
checkpoint, or on another rank, nobody knows.

Nor does anybody know of such a program, once it was asked to stop, whether its 0 says "done" or "stopped":
many end so on SIGTERM. It counts as stopped, as in a Job of Kubernetes: what is done ends with 0 once more.
Here that is the operator's own request; what a deletion or a disruption asked for is `Fate.STOPPED`.
"""

from __future__ import annotations

from zerotrain.operator.reconcile.attempts import CLOCK_DOUBT, AttemptView, Fate
from zerotrain.operator.reconcile.draft import Draft

_SURE = frozenset({Fate.SUCCEEDED})
_UNLESS_PROVEN = frozenset({Fate.SUCCEEDED, Fate.LOST})


def is_done(draft: Draft, view: AttemptView) -> bool:
    """Whether the job is complete. One worker that failed, yielded or still runs is enough for a no."""
    if view.all_in(_SURE):
        return not _may_be_an_answer(draft, view)
    return view.all_in(_UNLESS_PROVEN) and _all_steps_are_done(draft, view)


def _may_be_an_answer(draft: Draft, view: AttemptView) -> bool:
    """Whether some worker ended with 0 because it was asked to stop. One is enough: with the others it would
    have gone on."""
    asked, state = draft.status.checkpoint.requested_at, draft.observed.yielding
    if asked is None or not draft.job.spec.command:
        return False
    if state is not None and state.attempt == view.number and state.acked_at is not None:
        return True
    # The answer may be lost, or in the memory of an operator before this one: then the times must do, of
    # which one is the node's.
    since = asked - CLOCK_DOUBT
    pods = [worker.pod for worker in view.workers if worker.pod is not None]
    return any(pod.deletion_at or pod.finished_at is None or pod.finished_at >= since for pod in pods)


def _all_steps_are_done(draft: Draft, view: AttemptView) -> bool:
    spec, status = draft.job.spec, draft.status
    if spec.command or spec.steps is None:
        return False
    if spec.checkpoint is not None:
        # All ranks write it together, and none is written of a training whose end is refused. That of another
        # attempt may be the one that this attempt found damaged.
        last = status.checkpoint.last
        return last is not None and last.durable and last.attempt == view.number and last.step >= spec.steps
    # Nothing is kept of such a job: it is done when all ranks made the last step, which ends in an exchange
    # between all of them. That the loss was accepted, too, is what the exit code of any of them says.
    ends = [
        worker.pod.termination
        for worker in view.workers
        if worker.fate is Fate.SUCCEEDED and worker.pod is not None
    ]
    return any(end is not None and end.step >= spec.steps for end in ends)


def told(view: AttemptView) -> str:
    """For the event: which workers' ends nobody saw."""
    unseen = view.indices(Fate.LOST)
    if not unseen:
        return ""
    names = f"{', '.join(str(index) for index in unseen[:5])}{', ...' if len(unseen) > 5 else ''}"
    return f"; the pods of workers {names} went unseen, but the last step was made and nothing was left to do"
