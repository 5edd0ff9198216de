"""The part of a job that reconcile decides by, read once per pass from the API model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerotrain.operator.api import ZeroTrainingJobSpec, ZeroTrainingJobStatus
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, QUEUE_LABEL


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Which object, in which of its lives."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool
    ignores_memory_plan: bool = False
    """The user's annotation: start it whatever the planner says."""
    queue_label: str = ""
    """Of Kueue: the name of a queue; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """One job as stored: identity, typed spec and typed status."""

    identity: JobIdentity
    spec: ZeroTrainingJobSpec
    status: ZeroTrainingJobStatus


@dataclass(slots=True)
class Known:
    """The models of a job's last pass: reading them again is most of a pass that changes nothing.

    A spec is the same while its generation is, a status while the resource version is. Forgetting is
    harmless.
    """

    generation: int | None = None
    spec: ZeroTrainingJobSpec | None = None
    version: str | None = None
    status: ZeroTrainingJobStatus | None = None

    def has_read(self, job: Mapping[str, Any]) -> bool:
        """Whether the spec costs nothing any more."""
        return self.spec is not None and self.generation == job["metadata"].get("generation")

    def read_spec(self, job: Mapping[str, Any]) -> ZeroTrainingJobSpec:
        """Raises pydantic.ValidationError."""
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
        """`job` is what the API server answered when `status` was written."""
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
