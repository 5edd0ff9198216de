"""The judge of chaos runs finds every broken promise: each row plants one in a history that is sound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.chaos.invariants import Invariants
from tests.cluster.chaos.orphans import hung_attempts, orphans
from tests.cluster.chaos.watch_recorder import Seen

pytestmark = pytest.mark.unit


Json = dict[str, Any]
JOB_UID = "job-uid"


def job(revision: int, phase: str, attempt: int, **status: Any) -> Seen:
    meta = {"name": "gpt", "uid": JOB_UID}
    body = {"metadata": meta, "status": {"phase": phase, "attempt": attempt, **status}}
    return Seen(revision=revision, kind="Job", change="MODIFIED", body=body)


def unwritten(revision: int) -> Seen:
    found = job(revision, "", 0)
    del found.body["status"]
    return found


def pod(revision: int, attempt: int, index: int, change: str = "ADDED", *, ended: Json | None = None) -> Seen:
    labels = {
        "zerotrain.dev/job-uid": JOB_UID,
        "zerotrain.dev/attempt": str(attempt),
        "zerotrain.dev/rank": str(index),
    }
    name = f"gpt-{attempt}-{index}"
    meta = {"name": name, "uid": f"{name}-uid", "labels": labels}
    state = {"terminated": ended} if ended else {}
    status = {"containerStatuses": [{"name": "worker", "state": state}]}
    return Seen(revision=revision, kind="Pod", change=change, body={"metadata": meta, "status": status})


def restarts(*attempts: int) -> Json:
    recent = [{"attempt": attempt, "cause": "app"} for attempt in attempts]
    return {
        "restarts": {"app": len(attempts), "total": len(attempts), "recent": recent},
        "failures": [{"attempt": attempt} for attempt in reversed(attempts)],
    }


YIELDED = {"exitCode": 75, "message": json.dumps({"checkpoint": {"step": 40}})}

SOUND = (
    job(10, "Pending", 1),
    pod(11, 1, 0),
    pod(12, 1, 1),
    job(13, "Running", 1, podsCreated=True),
    job(14, "Restarting", 1, **restarts(1)),
    pod(15, 1, 0, "DELETED"),
    pod(16, 1, 1, "DELETED"),
    job(17, "Pending", 2, **restarts(1)),
    pod(18, 2, 0),
    job(19, "Suspending", 2, **restarts(1)),
    pod(20, 2, 0, "MODIFIED", ended=YIELDED),
    pod(21, 2, 0, "DELETED", ended=YIELDED),
    job(22, "Suspended", 2, checkpoint={"last": {"step": 40}}, **restarts(1)),
    job(23, "Pending", 3, **restarts(1)),
    pod(24, 3, 0),
    job(25, "Completed", 3, completionTime="2026-01-01T00:00:00Z", **restarts(1)),
)


UNWRITTEN_FAILED = (
    unwritten(9),
    pod(11, 1, 0),
    pod(12, 1, 1),
    pod(13, 1, 0, "DELETED"),
    pod(14, 1, 1, "DELETED"),
    job(15, "Restarting", 1, **restarts(1)),
    job(16, "Pending", 2, **restarts(1)),
)
"""History of a small job whose first attempt failed before it was written to the status."""


def complaints(*history: Seen) -> list[str]:
    promises = Invariants()
    promises.read(sorted(history, key=lambda seen: seen.revision))
    return promises.complaints


def without(*revisions: int) -> tuple[Seen, ...]:
    return tuple(seen for seen in SOUND if seen.revision not in revisions)


def test_a_sound_history_has_no_complaints() -> None:
    assert complaints(*SOUND) == []
    assert complaints(*UNWRITTEN_FAILED) == []


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ((*SOUND, pod(26, 2, 1)), "during attempt 3"),
        ((*without(15), pod(27, 1, 0, "DELETED")), "was decided on while ['gpt-1-0'] existed"),
        ((*without(15), pod(27, 1, 0, "DELETED")), "gpt-2-0 was created while ['gpt-1-0'] existed"),
        (without(17, 18, 19, 20, 21, 22), "attempt 3 follows attempt 1"),
        (without(14, 15, 16, 17), "attempt 2"),
        (without(11, 12, 15, 16), "attempt 1 was lost"),
        ((*without(16), pod(16, 1, 1, "MODIFIED"), pod(26, 1, 1, "DELETED")), "existed"),
        ((*without(14), job(14, "Restarting", 1, **restarts(1, 1))), "charged twice"),
        ((*without(14), job(14, "Restarting", 1, **restarts(7))), "attempt 7 was charged late"),
        (
            (*without(14), job(14, "Restarting", 1, **{**restarts(1), "failures": []})),
            "without a failure",
        ),
        (
            (unwritten(9), pod(11, 1, 0), job(15, "Restarting", 1, **restarts(2))),
            "attempt 2 was charged late",
        ),
        (
            (unwritten(9), pod(11, 1, 0), job(15, "Restarting", 1, **{**restarts(1), "failures": []})),
            "attempt 1 was restarted without a failure",
        ),
        ((*SOUND, job(26, "Running", 3, **restarts(1))), "was Completed and became Running"),
        ((*SOUND, job(26, "Completed", 3, completionTime="2027-01-01T00:00:00Z", **restarts(1))), "moved"),
        ((*SOUND, job(26, "Completed", 3)), "fell from 1"),
        ((*SOUND, pod(26, 3, 1)), "for a job that was Completed"),
        ((*without(21), pod(26, 2, 0, "DELETED")), "is Suspended while ['gpt-2-0'] exist"),
        (
            (*without(22), job(22, "Suspended", 2, checkpoint={"last": {"step": 35}}, **restarts(1))),
            "status knows step 35, its ranks had step 40 durable",
        ),
    ],
)
def test_a_broken_promise_is_found(history: tuple[Seen, ...], words: str) -> None:
    assert any(words in text for text in complaints(*history)), complaints(*history)


def test_a_pod_name_may_return_only_before_all_pods_of_the_attempt_were_there() -> None:
    again = [pod(14, 1, 0, "DELETED"), pod(15, 1, 0)]
    early = [job(10, "Pending", 1), pod(11, 1, 0), *again]
    assert complaints(*early) == []
    late = [job(10, "Pending", 1), pod(11, 1, 0), job(12, "Running", 1, podsCreated=True), *again]
    assert any("used twice" in text for text in complaints(*late))


def test_the_first_attempt_may_be_begun_before_it_is_written() -> None:
    begun = (pod(11, 1, 0), job(12, "Pending", 1), pod(13, 1, 1))
    assert complaints(unwritten(10), *begun) == []
    assert any("gpt-2-0 was created during attempt 0" in text for text in complaints(pod(10, 2, 0), *begun))
    elastic = unwritten(10)
    elastic.body["spec"] = {"elastic": {"minWorkers": 1}}
    for first in (elastic, job(10, "Queued", 0)):
        assert any("gpt-1-0 was created during attempt 0" in text for text in complaints(first, *begun))


def test_stacks_of_a_hang_stay_whatever_ended_its_attempt() -> None:
    stacks, other = (of_attempt("ConfigMap", number, f"gpt-{number}-stacks") for number in (1, 2))
    history = [job(10, "Running", 1, hang={"attempt": 1}), job(11, "Suspended", 1)]
    now = job(12, "Running", 2).body
    assert orphans([now], [stacks], hung_attempts(history)) == []
    (found,) = orphans([now], [stacks, other], hung_attempts(history))
    assert "gpt-2-stacks is named nowhere" in found
    assert "outlived its job" in orphans([], [stacks], hung_attempts(history))[0]


def test_two_pods_of_one_worker_are_found() -> None:
    twin = pod(13, 1, 0)
    twin.body["metadata"]["uid"] = "another"
    assert any("beside" in text for text in complaints(job(10, "Pending", 1), pod(11, 1, 0), twin))


def test_orphans_are_found() -> None:
    owner = {"kind": "ZeroTrainingJob", "name": "gpt", "uid": JOB_UID}
    old = {"kind": "Pod", **pod(11, 1, 0).body}
    old["metadata"]["ownerReferences"] = [owner]
    assert orphans([job(10, "Running", 1).body], [old]) == []
    assert "outlived its attempt" in orphans([job(10, "Running", 2).body], [old])[0]
    assert "outlived its job" in orphans([], [old])[0]


def owned(kind: str, name: str, labels: Json | None = None, **more: Any) -> Json:
    owner = {"kind": "ZeroTrainingJob", "name": "gpt", "uid": JOB_UID}
    return {
        "kind": kind,
        "metadata": {"name": name, "labels": labels or {}, "ownerReferences": [owner]},
        **more,
    }


def of_attempt(kind: str, attempt: int, name: str = "gpt-x") -> Json:
    return owned(kind, name, {"zerotrain.dev/attempt": str(attempt)})


def reader(name: str) -> Json:
    return owned("Pod", name, {"zerotrain.dev/helper": "verify"})


READ = {"verification": {"pod": "gpt-2-verify-2", "tries": 2, "state": "Verified"}}
DONE = {"conditions": [{"type": "Finished", "status": "True"}]}


@pytest.mark.parametrize(
    ("item", "phase", "words"),
    [
        (of_attempt("PodDisruptionBudget", 2), "Running", ""),
        (of_attempt("PodDisruptionBudget", 1), "Running", "outlived its attempt; the job is at 2"),
        (of_attempt("PodDisruptionBudget", 2), "Suspended", "is of no use; the job is Suspended"),
        (of_attempt("PodDisruptionBudget", 2), "Completed", "is of no use; the job is Completed"),
        (of_attempt("PodGroup", 2), "Pending", ""),
        (of_attempt("PodGroup", 1), "Pending", "outlived its attempt; the job is at 2"),
        (of_attempt("PodGroup", 2), "Suspended", "is of no use; the job is Suspended"),
        (of_attempt("PodGroup", 2), "Failed", "is of no use; the job is Failed"),
        (owned("Workload", "gpt"), "Running", ""),
        (owned("Workload", "gpt"), "Suspended", "still holds its quota; the job is Suspended"),
        (owned("Workload", "gpt"), "Completed", "still holds its quota; the job is Completed"),
        (owned("Workload", "gpt", status=DONE), "Completed", ""),
        (of_attempt("ConfigMap", 1, "gpt-1-stacks"), "Running", ""),
        (of_attempt("ConfigMap", 1, "gpt-0-stacks"), "Running", "named nowhere"),
        (owned("ConfigMap", "gpt-failures"), "Completed", ""),
        (reader("gpt-2-verify-1"), "Completed", ""),
        (reader("gpt-2-verify-2"), "Completed", ""),
        (reader("gpt-2-verify-3"), "Completed", "is none of those that status tells of, 2 up to"),
        (reader("gpt-1-verify-1"), "Completed", "is none of those"),
        (of_attempt("Secret", 1), "Running", ""),
    ],
)
def test_each_kind_is_checked_by_its_own_rule(item: Json, phase: str, words: str) -> None:
    failures = [{"attempt": 1, "stacks": "gpt-1-stacks"}]
    at_two = job(10, phase, 2, failures=failures, checkpoint=READ).body
    found = orphans([at_two], [item])
    assert [words in text for text in found] == [True] * bool(words), found


@pytest.mark.parametrize(
    ("record", "policy", "words"),
    [
        (None, {}, "still reads, or nobody waits for it"),
        ({**READ["verification"], "state": "Running"}, {}, "still reads"),
        (READ["verification"], {"cleanPodPolicy": "All"}, "cleanPodPolicy is All"),
    ],
)
def test_a_verification_pod_needs_a_job_that_waits_for_it(
    record: Json | None, policy: Json, words: str
) -> None:
    done = job(10, "Completed", 2, checkpoint={"verification": record}).body
    (found,) = orphans([{**done, "spec": {"runPolicy": policy}}], [reader("gpt-2-verify-2")])
    assert words in found


def reads(revision: int, number: int, phase: str = "Pending") -> Seen:
    name = f"gpt-3-verify-{number}"
    labels = {"zerotrain.dev/job-uid": JOB_UID, "zerotrain.dev/helper": "verify"}
    body = {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {"phase": phase}}
    return Seen(revision=revision, kind="Pod", change="ADDED", body=body)


def verifying(revision: int, number: int, phase: str = "Completed") -> Seen:
    record = {"pod": f"gpt-3-verify-{number}", "tries": number, "state": "Running"}
    fields = {"completionTime": "2026-01-01T00:00:00Z", "checkpoint": {"verification": record}}
    return job(revision, phase, 3, **fields, **restarts(1))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((verifying(26, 1), reads(27, 1)), ""),
        ((verifying(26, 1), reads(27, 1), reads(28, 1, "Failed"), verifying(29, 2), reads(30, 2)), ""),
        ((reads(26, 1), verifying(27, 1)), "was created and status names None"),
        ((verifying(26, 1), reads(27, 2)), "status names gpt-3-verify-1"),
        ((verifying(26, 1), reads(27, 1), verifying(28, 2), reads(29, 2)), "beside gpt-3-verify-1"),
    ],
)
def test_pods_that_read_come_one_by_one_and_are_in_status_first(more: tuple[Seen, ...], words: str) -> None:
    found = complaints(*SOUND, *more)
    assert [words in text for text in found] == [True] * bool(words), found


def workload(revision: int, change: str = "MODIFIED", **conditions: bool) -> Seen:
    items = [{"type": kind, "status": str(value)} for kind, value in conditions.items()]
    meta = {"name": "gpt", "uid": "workload", "ownerReferences": [{"uid": JOB_UID}]}
    return Seen(
        revision=revision,
        kind="Workload",
        change=change,
        body={"metadata": meta, "status": {"conditions": items}},
    )


def queued(revision: int, phase: str, attempt: int) -> Seen:
    found = job(revision, phase, attempt)
    found.body["spec"] = {"scheduling": {"queueName": "team-a"}}
    return found


WAITING = (queued(10, "Queued", 0), workload(11, "ADDED"))
ADMITTED = (*WAITING, workload(12, QuotaReserved=True), queued(13, "Pending", 1), pod(14, 1, 0))


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ((*ADMITTED, pod(15, 1, 0, "DELETED"), workload(16, QuotaReserved=False)), ""),
        ((*ADMITTED, pod(15, 1, 0, "DELETED"), workload(16, "DELETED", QuotaReserved=True)), ""),
        ((*WAITING, queued(13, "Pending", 1), pod(14, 1, 0)), "before team-a admitted the job"),
        ((*ADMITTED, workload(16, QuotaReserved=False)), "its quota went back while ['gpt-1-0'] existed"),
        ((*ADMITTED, workload(16, "DELETED", QuotaReserved=True)), "its quota went back"),
        (
            (*ADMITTED, workload(16, QuotaReserved=True, Finished=True)),
            "is finished and the job is Pending",
        ),
    ],
)
def test_a_queue_is_asked_first_and_gets_its_quota_back_last(history: tuple[Seen, ...], words: str) -> None:
    found = complaints(*history)
    assert [words in text for text in found] == [True] * bool(words), found


def test_a_node_that_was_to_be_replaced_is_kept_off() -> None:
    failed = restarts(1)
    failed["failures"][0] |= {"action": "ReplaceNodeAndRestart", "node": "node-0"}
    again = (*without(14), job(14, "Restarting", 1, **failed))
    assert any("node node-0 was to be replaced" in text for text in complaints(*again))
    away = {"excludedNodes": [{"name": "node-0"}]}
    assert complaints(*without(14), job(14, "Restarting", 1, **failed, **away)) == []
    placed = pod(15, 1, 0, "MODIFIED")
    placed.body["spec"] = {"nodeName": "node-0"}
    begun = (job(13, "Pending", 1, shape={"excludedNodes": ["node-0"]}), pod(14, 1, 0))
    assert complaints(*begun) == []
    assert any("that its attempt keeps off" in text for text in complaints(*begun, placed))
