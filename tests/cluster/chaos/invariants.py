"""Rules that hold for every history, whatever crashed in it.

The module has no I/O: it takes the recorder's records and returns complaints. `Invariants` walks the history
once, oldest version first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.chaos.watch_recorder import Seen
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.constants import (
    CONTAINER_NAME,
    LABEL_ATTEMPT,
    LABEL_HELPER,
    LABEL_JOB_UID,
    LABEL_RANK,
)

Json = dict[str, Any]

FINISHED = frozenset({"Completed", "Failed"})
BETWEEN = frozenset({"Restarting", "Suspending", "Suspended", "Yielding", "Stalled", "Queued"})
"""Phases that may come between one attempt and the next."""
_WORKER = {LABEL_JOB_UID, LABEL_ATTEMPT, LABEL_RANK}


@dataclass(slots=True)
class _Job:
    """One job, from its creation to its deletion, as known from the history so far."""

    name: str
    attempt: int = 0
    phase: str = ""
    status: Json = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Phases of the current attempt."""
    pods: dict[str, Json] = field(default_factory=dict)
    """Existing pods by UID."""
    names: set[str] = field(default_factory=set)
    """Names of all pods that ever existed."""
    manned: set[int] = field(default_factory=set)
    """Attempts that had a pod."""
    yielded: dict[int, int] = field(default_factory=dict)
    """Durable step in the termination messages of the yielding ranks, by attempt."""
    deleted: bool = False
    elastic: bool = False
    queue: str = ""
    """The job's queue in Kueue; empty without one."""
    admissions: int = 0
    """Number of admissions of its Workload."""
    reserves: bool = False
    """Whether its Workload holds quota."""
    readers: dict[str, Json] = field(default_factory=dict)
    """Existing pods that verify a checkpoint, by UID."""


class Invariants:
    """Checker of a history: call `read`, then use `complaints`."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.jobs: dict[str, _Job] = {}
        self.pods = 0

    def read(self, history: Iterable[Seen]) -> None:
        for seen in history:
            if seen.kind == "Job":
                self._job(seen)
            elif seen.kind == "Workload":
                self._workload(seen)
            elif seen.body["metadata"].get("labels", {}).keys() >= _WORKER:
                self._pod(seen)
            elif LABEL_HELPER in seen.body["metadata"].get("labels", {}):
                self._reader(seen)

    def summary(self) -> Counter[str]:
        """Return counts of what the operator did, by the last status of every job.

        They are failures by reason and action, outcomes of verifications, admissions and gangs.
        """
        found: Counter[str] = Counter()
        for job in self.jobs.values():
            for failure in job.status.get("failures", ()):
                found[" ".join(filter(None, (failure.get("reason"), failure.get("action"))))] += 1
            record = (job.status.get("checkpoint") or {}).get("verification") or {}
            found["checkpoint " + record.get("state", "not read")] += 1
            found["admissions"] += job.admissions
            if gang := (job.status.get("shape") or {}).get("gang"):
                found[f"gang {gang}"] += 1
        return found

    def _complain(self, job: _Job, seen: Seen, text: str) -> None:
        self.complaints.append(f"{job.name}, revision {seen.revision}: {text}")

    def _job(self, seen: Seen) -> None:
        job = self.jobs.setdefault(seen.uid, _Job(name=seen.name))
        if seen.change == "DELETED":
            job.deleted = True
            return
        new = seen.body.get("status", {})
        job.elastic = bool(seen.body.get("spec", {}).get("elastic"))
        job.queue = (seen.body.get("spec", {}).get("scheduling") or {}).get("queueName", "")
        charged = new.get("restarts", {}).get("total", 0) > job.status.get("restarts", {}).get("total", 0)
        if charged:
            job.left.add("Restarting")  # it may pass within one write, when no pod is left to wait for
        self._attempt(job, seen, int(new.get("attempt", 0)))
        self._restarts(job, seen, job.status.get("restarts", {}), new)
        self._end(job, seen, new)
        self._suspended(job, seen, new)
        job.status, job.phase, job.attempt = new, str(new.get("phase", "")), int(new.get("attempt", 0))
        job.left.add(job.phase)

    def _attempt(self, job: _Job, seen: Seen, attempt: int) -> None:
        if attempt == job.attempt:
            return
        if attempt != job.attempt + 1:
            self._complain(job, seen, f"attempt {attempt} follows attempt {job.attempt}")
        if job.attempt and not job.left & BETWEEN:
            self._complain(job, seen, f"attempt {attempt} began while {job.attempt} was {job.phase}")
        if job.attempt and job.attempt not in job.manned and not job.left & (BETWEEN - {"Restarting"}):
            self._complain(job, seen, f"attempt {job.attempt} was lost: it never had a pod")
        before = [pod for pod in job.pods.values() if not (job.attempt == 0 and _attempt_of(pod) == attempt)]
        if before:
            names = sorted(pod["metadata"]["name"] for pod in before)
            self._complain(job, seen, f"attempt {attempt} was decided on while {names} existed")
        job.left = set()

    def _restarts(self, job: _Job, seen: Seen, old: Json, new: Json) -> None:
        now = new.get("restarts", {})
        for cause in ("app", "infra", "preemption", "total"):
            if now.get(cause, 0) < old.get(cause, 0):
                self._complain(job, seen, f"restarts.{cause} fell from {old.get(cause, 0)}")
        if now.get("total", 0) > old.get("total", 0) + 1:
            self._complain(job, seen, f"restarts.total rose from {old.get('total', 0)} to {now['total']}")
        charged = [item["attempt"] for item in now.get("recent", ())]
        if len(charged) != len(set(charged)):
            self._complain(job, seen, f"an attempt was charged twice: {charged}")
        recorded = [item["attempt"] for item in new.get("failures", ())]
        if len(recorded) != len(set(recorded)):
            self._complain(job, seen, f"a failure was recorded twice: {recorded}")
        if now.get("total", 0) == old.get("total", 0) + 1:
            # The first attempt of a small job may have failed before it is written.
            failed = job.attempt or 1
            last = now["recent"][-1] if now.get("recent") else {}
            if last.get("attempt") != failed:
                self._complain(job, seen, f"a restart of attempt {last.get('attempt')} was charged late")
            if last.get("cause") != "preemption" and failed not in recorded:
                self._complain(job, seen, f"attempt {failed} was restarted without a failure")
            self._replaced(job, seen, new, failed)

    def _replaced(self, job: _Job, seen: Seen, new: Json, attempt: int) -> None:
        recorded: list[Json] = [item for item in new.get("failures", ()) if item["attempt"] == attempt]
        failure = recorded[0] if recorded else {}
        away = {item["name"] for item in new.get("excludedNodes", ())}
        if failure.get("action") == "ReplaceNodeAndRestart" and failure.get("node", "") not in {"", *away}:
            self._complain(job, seen, f"node {failure['node']} was to be replaced and may be used")

    def _end(self, job: _Job, seen: Seen, new: Json) -> None:
        if job.phase in FINISHED and new.get("phase") != job.phase:
            self._complain(job, seen, f"was {job.phase} and became {new.get('phase')}")
        ended, now = job.status.get("completionTime"), new.get("completionTime")
        if ended is not None and ended != now:
            self._complain(job, seen, f"completionTime moved from {ended} to {now}")

    def _suspended(self, job: _Job, seen: Seen, new: Json) -> None:
        if new.get("phase") != "Suspended" or job.phase == "Suspended":
            return
        if job.pods:
            names = sorted(pod["metadata"]["name"] for pod in job.pods.values())
            self._complain(job, seen, f"is Suspended while {names} exist")
        durable = job.yielded.get(job.attempt, 0)
        known = ((new.get("checkpoint") or {}).get("last") or {}).get("step", 0)
        if known < durable:
            self._complain(job, seen, f"status knows step {known}, its ranks had step {durable} durable")

    def _pod(self, seen: Seen) -> None:
        labels = seen.body["metadata"]["labels"]
        job = self.jobs.setdefault(labels[LABEL_JOB_UID], _Job(name=seen.name))
        attempt = int(labels[LABEL_ATTEMPT])
        if seen.change == "DELETED":
            self._last_words(job, attempt, seen.body)
            job.pods.pop(seen.uid, None)
            return
        if seen.uid not in job.pods:
            self._created(job, seen, attempt)
        job.pods[seen.uid] = seen.body
        away = job.status.get("shape", {}).get("excludedNodes", ())
        if attempt == job.attempt and seen.body.get("spec", {}).get("nodeName") in away:
            self._complain(job, seen, f"pod {seen.name} is on a node that its attempt keeps off")
        self._last_words(job, attempt, seen.body)

    def _created(self, job: _Job, seen: Seen, attempt: int) -> None:
        self.pods += 1
        job.manned.add(attempt)
        if job.deleted:
            return  # done by the garbage collector; that none remains is checked at the end
        # The first attempt of a small job begins before it is written.
        is_first = attempt == 1 and not job.status and not job.elastic
        if attempt != job.attempt and not is_first:
            self._complain(job, seen, f"pod {seen.name} was created during attempt {job.attempt}")
        others = {pod["metadata"]["name"] for pod in job.pods.values() if _attempt_of(pod) != attempt}
        if others:
            self._complain(job, seen, f"pod {seen.name} was created while {sorted(others)} existed")
        twins = [pod for pod in job.pods.values() if _index_of(pod) == _index_of(seen.body)]
        if twins:
            self._complain(job, seen, f"pod {seen.name} was created beside {twins[0]['metadata']['name']}")
        # Until all pods of the attempt were seen once, a new operator cannot distinguish a deleted pod from
        # one that was never created; no ranks have met yet.
        if seen.name in job.names and job.status.get("podsCreated"):
            self._complain(job, seen, f"the pod name {seen.name} was used twice")
        if job.phase in FINISHED:
            self._complain(job, seen, f"pod {seen.name} was created for a job that was {job.phase}")
        if job.queue and not job.admissions:
            self._complain(job, seen, f"pod {seen.name} was created before {job.queue} admitted the job")
        job.names.add(seen.name)

    def _last_words(self, job: _Job, attempt: int, pod: Mapping[str, Any]) -> None:
        """Record the termination messages of pods that stay until the operator deletes them.

        A pod that ends by its deletion disappears at once, together with its message, if no operator is
        alive. The next attempt then finds its checkpoint.
        """
        if pod["metadata"].get("deletionTimestamp"):
            return
        for container in pod.get("status", {}).get("containerStatuses", ()):
            ended = container.get("state", {}).get("terminated")
            if container["name"] == CONTAINER_NAME and ended and ended["exitCode"] == ExitCode.YIELDED:
                step = (json.loads(ended.get("message") or "{}").get("checkpoint") or {}).get("step", 0)
                job.yielded[attempt] = max(job.yielded.get(attempt, 0), step)

    def _workload(self, seen: Seen) -> None:
        owners = (owner["uid"] for owner in seen.body["metadata"].get("ownerReferences", ()))
        job = self.jobs.setdefault(next(owners, seen.uid), _Job(name=seen.name))
        reserves = seen.change != "DELETED" and is_true(seen.body, "QuotaReserved")
        job.admissions += reserves and not job.reserves
        if job.reserves and not reserves and job.pods and not job.deleted:
            names = sorted(pod["metadata"]["name"] for pod in job.pods.values())
            self._complain(job, seen, f"its quota went back while {names} existed")
        if is_true(seen.body, "Finished") and job.phase not in FINISHED and not job.deleted:
            self._complain(job, seen, f"its Workload is finished and the job is {job.phase}")
        job.reserves = reserves

    def _reader(self, seen: Seen) -> None:
        """Check one pod that verifies a checkpoint."""
        job = self.jobs.setdefault(seen.body["metadata"]["labels"][LABEL_JOB_UID], _Job(name=seen.name))
        if seen.change == "DELETED":
            job.readers.pop(seen.uid, None)
            return
        is_new = seen.uid not in job.readers
        reads = [pod for uid, pod in job.readers.items() if uid != seen.uid and not _is_over(pod)]
        job.readers[seen.uid] = seen.body
        if not is_new or job.deleted:
            return
        record = (job.status.get("checkpoint") or {}).get("verification") or {}
        if record.get("pod") != seen.name:
            self._complain(job, seen, f"pod {seen.name} was created and status names {record.get('pod')}")
        if job.phase != "Completed":
            self._complain(job, seen, f"pod {seen.name} reads a checkpoint of a job that was {job.phase}")
        if reads:
            self._complain(job, seen, f"pod {seen.name} was created beside {reads[0]['metadata']['name']}")


def is_true(item: Json, kind: str) -> bool:
    """Return whether the object has a condition of this type that is true."""
    found = item.get("status", {}).get("conditions", ())
    return any(each["type"] == kind and each["status"] == "True" for each in found)


def _is_over(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _attempt_of(pod: Mapping[str, Any]) -> int:
    return int(pod["metadata"]["labels"][LABEL_ATTEMPT])


def _index_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["labels"][LABEL_RANK])
