"""Objects that outlive their job, their attempt or their use."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tests.cluster.chaos.invariants import FINISHED, is_true
from tests.cluster.chaos.watch_recorder import Seen
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_HELPER

Json = dict[str, Any]

ATTENDED = frozenset({"Running", "Yielding", "Suspending"})
"""Phases that may have a disruption budget."""

AT_WORK = ATTENDED | {"Pending", "Starting", "Restarting", "Queued"}
"""Phases that may have a pod group: of an attempt that runs, or that is just being deleted."""


Hung = Collection[tuple[str, str]]
"""Pairs (UID of the job, name of the ConfigMap with the stacks) of attempts with a reported hang."""


def orphans(jobs: Iterable[Json], objects: Iterable[Json], hung: Hung = ()) -> list[str]:
    """Return objects of deleted jobs or ended attempts, and those that an idle job does not need.

    Stacks of a hang stay with the job, even if its attempt then ended for another reason.
    """
    alive = {job["metadata"]["uid"]: job for job in jobs}
    found = []
    for item in objects:
        for owner in item["metadata"].get("ownerReferences", ()):
            if owner["kind"] != "ZeroTrainingJob":
                continue
            job = alive.get(owner["uid"])
            if job is not None and (owner["uid"], item["metadata"]["name"]) in hung:
                continue
            problem = f"outlived its job {owner['name']}" if job is None else _outlived(item, job)
            if problem:
                found.append(f"{item['kind']} {item['metadata']['name']} {problem}")
    return found


def _outlived(item: Json, job: Json) -> str:
    """Return what is wrong with an object of an existing job; empty if nothing is."""
    status = job.get("status", {})
    attempt, phase = int(status.get("attempt", 0)), str(status.get("phase", ""))
    kind, labels = item["kind"], item["metadata"].get("labels", {})
    own = labels.get(LABEL_ATTEMPT)
    if kind == "Workload":
        over = phase in FINISHED and not is_true(item, "Finished")
        return f"still holds its quota; the job is {phase}" if over or phase == "Suspended" else ""
    if LABEL_HELPER in labels:
        return _unread(item, job)
    if own is None:
        return ""  # of the job and not of an attempt
    if kind == "ConfigMap":
        return (
            ""
            if item["metadata"]["name"] in _referenced_stacks(status)
            else "is named nowhere in the job's status"
        )
    if kind in ("Pod", "PodDisruptionBudget", "PodGroup") and int(own) != attempt:
        return f"outlived its attempt; the job is at {attempt}"
    allowed = {"PodDisruptionBudget": ATTENDED, "PodGroup": AT_WORK}.get(kind)
    return f"is of no use; the job is {phase}" if allowed is not None and phase not in allowed else ""


def _unread(pod: Json, job: Json) -> str:
    """Return what is wrong with a pod that verified a checkpoint."""
    status = job.get("status", {})
    record = (status.get("checkpoint") or {}).get("verification") or {}
    if record.get("state", "Running") == "Running":
        return "still reads, or nobody waits for it"
    stem, _, number = pod["metadata"]["name"].rpartition("-")
    if record["pod"].rpartition("-")[0] != stem or int(number) > record["tries"]:
        return f"is none of those that status tells of, {record['tries']} up to {record['pod']}"
    takes_all = job.get("spec", {}).get("runPolicy", {}).get("cleanPodPolicy") == "All"
    return "is of no use: cleanPodPolicy is All" if takes_all else ""


def hung_attempts(history: Iterable[Seen]) -> set[tuple[str, str]]:
    """Return the attempts with a hang of all jobs whose every version is in the history."""
    found = set()
    for seen in history:
        hang = seen.body.get("status", {}).get("hang") if seen.kind == "Job" else None
        if hang:
            found.add((seen.uid, f"{seen.name}-{hang['attempt']}-stacks"))
    return found


def _referenced_stacks(status: Json) -> set[str]:
    """Return the ConfigMaps with stacks that the status names."""
    places = [status.get("hang") or {}, *status.get("failures", ())]
    return {str(place["stacks"]) for place in places if place.get("stacks")}
