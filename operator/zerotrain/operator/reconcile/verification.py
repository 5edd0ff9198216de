"""Verification of the newest checkpoint of a completed job, with a one-shot pod.

The operator cannot mount the job's volume and relies on the workers for "durable"; this pod reads every byte
that they left. Its record is in status before the pod is created, so that a restart of the operator neither
creates a second one nor omits it. A pod without a result (evicted, no command line in the image) is followed
by another, TRIES in all, within one time limit for all of them.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import PurePosixPath

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.api import Phase
from zerotrain.operator.api.lifecycle import CleanPodPolicy, Verification, VerificationState
from zerotrain.operator.api.status import CheckpointRecord
from zerotrain.operator.api.storage import Verify
from zerotrain.operator.constants import Reason
from zerotrain.operator.reconcile.draft import Draft, stored
from zerotrain.operator.reconcile.plan import CreateVerification
from zerotrain.operator.reconcile.pods import PodView, WorkerState
from zerotrain.operator.reconcile.teardown import delete_pods
from zerotrain.operator.resources.container import checkpoint_folder
from zerotrain.operator.resources.verification import verification_pod_name

TRIES = 3
DEFAULT_LIMIT_S = 7200

_NAME = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]{0,127}")
"""Valid name of a checkpoint's folder; a name that the workers report becomes an argument of a program."""


_REASONS = {
    VerificationState.VERIFIED: Reason.CHECKPOINT_VERIFIED,
    VerificationState.DAMAGED: Reason.CHECKPOINT_DAMAGED,
    VerificationState.UNKNOWN: Reason.VERIFICATION_FAILED,
}
"""Reason of the event on each outcome."""


def pending(draft: Draft) -> bool:
    """Return whether a verification is wanted that has no outcome yet; the time to live waits for it."""
    found = draft.status.checkpoint.verification
    return _subject(draft) is not None and (found is None or found.state is VerificationState.RUNNING)


def advance(draft: Draft) -> None:
    """Begin the verification, follow it, and delete its pod if all pods are deleted.

    It is called in every pass, after the phase.
    """
    found, subject = draft.status.checkpoint.verification, _subject(draft)
    if subject is None:
        if found is not None and found.state is VerificationState.RUNNING:
            _forget(draft)
        else:
            _end_live(draft)
    elif found is None:
        _begin(draft, subject)
    elif found.state is VerificationState.RUNNING:
        _follow(draft, found)
    elif draft.job.spec.run_policy.clean_pod_policy is CleanPodPolicy.ALL:
        _end_pods(draft, grace_s=1)
    else:
        _end_live(draft)


def _subject(draft: Draft) -> CheckpointRecord | None:
    """Return the checkpoint that the spec wants verified now; None without one."""
    checkpoint = draft.job.spec.checkpoint
    if checkpoint is None or checkpoint.verify is not Verify.ON_COMPLETION:
        return None
    return draft.status.checkpoint.last if draft.status.phase is Phase.COMPLETED else None


def _begin(draft: Draft, subject: CheckpointRecord) -> None:
    name = PurePosixPath(subject.path).name
    record = Verification(
        state=VerificationState.RUNNING,
        step=subject.step,
        checkpoint=stored(name, 128),
        start_time=draft.stamp,
    )
    message = _unreachable(draft, subject)
    if message is not None:
        _conclude(draft, record, VerificationState.UNKNOWN, message)
        return
    _try(draft, record, number=1)


def _unreachable(draft: Draft, subject: CheckpointRecord) -> str | None:
    """Return why the pod could not read the checkpoint; None if it can.

    A user program may write to any folder. The pod then finds nothing of that name in the job's folder, which
    says nothing about the checkpoint.
    """
    path, identity, checkpoint = PurePosixPath(subject.path), draft.job.identity, draft.job.spec.checkpoint
    reported = f"the workers reported {stored(subject.path, 200)!r}, which"
    if _NAME.fullmatch(path.name) is None:
        return f"{reported} names no checkpoint folder"
    if checkpoint is None:
        return None
    folder = PurePosixPath(checkpoint_folder(identity.namespace, identity.name, checkpoint))
    if path.parent == folder:
        return None
    return (
        f"{reported} is not directly in {folder}, the one folder that is verified; check it with the program "
        "that wrote it, and write into the folder that ZEROTRAIN_CHECKPOINT_DIR names to have it verified"
    )


def _try(draft: Draft, record: Verification, *, number: int) -> None:
    pod = verification_pod_name(draft.job.identity.name, draft.status.attempt, number)
    record = record.model_copy(update={"pod": pod, "tries": number})
    _set(draft, record)
    _ensure(draft, record)


def _ensure(draft: Draft, record: Verification) -> None:
    limit = _limit(draft)
    draft.act(
        CreateVerification(
            pod=record.pod, checkpoint=record.checkpoint, limit_s=max(1, int(limit.total_seconds()))
        )
    )
    draft.wake(record.start_time + limit)


def _follow(draft: Draft, record: Verification) -> None:
    pod = next((pod for pod in draft.observed.helpers if pod.name == record.pod), None)
    if pod is not None and pod.ended:
        state, message = _outcome(pod)
        if state is VerificationState.UNKNOWN and record.tries < TRIES:
            _try(draft, record, number=record.tries + 1)
        else:
            _conclude(draft, record, state, message)
    elif draft.is_due(record.start_time + _limit(draft)):
        _end_pods(draft, grace_s=0)
        message = f"no outcome within {_limit(draft).total_seconds():.0f} s{_why(draft, pod)}"
        _conclude(draft, record, VerificationState.UNKNOWN, message)
    elif pod is None:
        _ensure(draft, record)


def _outcome(pod: PodView) -> tuple[VerificationState, str]:
    last_line = pod.termination.last_line if pod.termination is not None else None
    if pod.state is WorkerState.SUCCEEDED:
        return VerificationState.VERIFIED, "every byte was read and is as it was written"
    if pod.exit_code == ExitCode.CHECKPOINT_UNUSABLE and pod.pod_reason is None:
        message = last_line or "it does not pass zerotrain checkpoint verify"
        return VerificationState.DAMAGED, message.strip()
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else f"pod phase {pod.phase}"
    if pod.exit_code == ExitCode.STORAGE_FAILED:
        code = f"the volume failed while it was read ({code})"
    parts = [code, pod.disruption, pod.pod_reason, pod.pod_message, last_line]
    return VerificationState.UNKNOWN, ": ".join(part.strip() for part in parts if part)


def _why(draft: Draft, pod: PodView | None) -> str:
    """Return what the pod waited for, in the cluster's words."""
    problem = draft.observed.problem
    found = pod.waiting or pod.unscheduled_reason if pod is not None else problem.message if problem else None
    return f": {found}" if found else ""


def _conclude(draft: Draft, record: Verification, state: VerificationState, message: str) -> None:
    message = stored(message)
    update = {"state": state, "message": message, "completion_time": draft.stamp}
    _set(draft, record.model_copy(update=update))
    draft.wake(draft.now)  # the time to live, which waited for the outcome, was already checked in this pass
    verified = state is VerificationState.VERIFIED
    where = f"checkpoint {record.checkpoint} of step {record.step}"
    draft.emit(_REASONS[state], f"{where}: {message}", warning=not verified)


def _forget(draft: Draft) -> None:
    """Stop the verification, because it is no longer wanted."""
    _end_pods(draft, grace_s=1)
    _set(draft, None)


def _end_pods(draft: Draft, *, grace_s: int) -> None:
    helpers = draft.observed.helpers
    delete_pods(draft, [pod for pod in helpers if pod.deletion_at is None or grace_s == 0], grace_s)


def _end_live(draft: Draft) -> None:
    """Delete pods that still run: a deletion that was requested with the outcome may have failed."""
    helpers = draft.observed.helpers
    delete_pods(draft, [pod for pod in helpers if not pod.ended and pod.deletion_at is None], 1)


def _limit(draft: Draft) -> timedelta:
    checkpoint = draft.job.spec.checkpoint
    asked = checkpoint.verify_timeout_seconds if checkpoint is not None else None
    return timedelta(seconds=asked or DEFAULT_LIMIT_S)


def _set(draft: Draft, record: Verification | None) -> None:
    draft.set(checkpoint=draft.status.checkpoint.model_copy(update={"verification": record}))
