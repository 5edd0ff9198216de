"""The part of a job that `reconcile` uses, read once per pass with the API models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerotrain.operator.api import ZeroTrainingJobSpec, ZeroTrainingJobStatus
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, QUEUE_LABEL


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Identity of the job object, and what its metadata says."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    ignores_memory_plan: bool = False
    """Whether the user's annotation says to start the job whatever the memory planner says."""
    queue_label: str = ""
    """Name of the queue in Kueue's label; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """One job as stored: identity, typed spec and typed status."""

    identity: JobIdentity
    spec: ZeroTrainingJobSpec
    status: ZeroTrainingJobStatus


@dataclass(slots=True)
class Known:
    """The parsed models of a job's last pass; parsing them again is most of the cost of a pass without
    changes.

    A spec is unchanged while its generation is, a status while the resource version is. The cache may be
    dropped at any time.
    """

    generation: int | None = None
    spec: ZeroTrainingJobSpec | None = None
    version: str | None = None
    status: ZeroTrainingJobStatus | None = None

    def has_read(self, job: Mapping[str, Any]) -> bool:
        """Return whether the spec is cached."""
        return self.spec is not None and self.generation == job["metadata"].get("generation")

    def read_spec(self, job: Mapping[str, Any]) -> ZeroTrainingJobSpec:
        """Return the spec, from the cache if possible. Raises pydantic.ValidationError."""
        generation = job["metadata"].get("generation")
        if self.spec is None or generation is None or generation != self.generation:
            self.spec, self.generation = ZeroTrainingJobSpec.model_validate(job.get("spec", {})), generation
        return self.spec

    def read_status(self, job: Mapping[str, Any]) -> ZeroTrainingJobStatus:
        status, version = self.status, job["metadata"].get("resourceVersion")
        if status is None or version is None or version != self.version:
            status = ZeroTrainingJobStatus.model_validate(job.get("status", {}))
            self.keep_status(job, status)
        return status

    def keep_status(self, job: Mapping[str, Any], status: ZeroTrainingJobStatus) -> None:
        """Cache the status; `job` is the API server's response to the write of `status`."""
        self.status, self.version = status, job["metadata"].get("resourceVersion")


def identity_of(job: Mapping[str, Any]) -> JobIdentity:
    meta = job["metadata"]
    return JobIdentity(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=int(meta.get("generation", 0)),
        deleting=meta.get("deletionTimestamp") is not None,
        queue_label=str((meta.get("labels") or {}).get(QUEUE_LABEL) or ""),
        ignores_memory_plan=meta.get("annotations", {}).get(ANNOTATION_IGNORE_MEMORY_PLAN) == "true",
    )
