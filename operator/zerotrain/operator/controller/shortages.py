"""Jobs of a namespace that hold a part of what they need: they give it back one after the other."""

from __future__ import annotations

from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.jobs import JobCache

_PHASES = ("Pending", "Starting")


def older_in_shortage(jobs: JobCache, job: Json) -> str | None:
    """Return the name of the oldest job of the namespace that is older than `job` and lacks a part of what it
    needs. None unless `job` itself lacks a part or gave its part back, as no other job needs to know."""
    status = job.get("status", {})
    if not (status.get("shortage") or status.get("givenBack")):
        return None
    own, namespace = _age(job), job["metadata"]["namespace"]
    older = [
        age
        for key, other in jobs.in_phases(_PHASES)
        if key.namespace == namespace and other["status"].get("shortage") and (age := _age(other)) < own
    ]
    return min(older)[1] if older else None


def _age(job: Json) -> tuple[str, str]:
    """Return a key that orders jobs of one namespace by age; the API server's timestamps are whole
    seconds."""
    return job["metadata"].get("creationTimestamp", ""), job["metadata"]["name"]
