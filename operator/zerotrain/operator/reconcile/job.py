"""The part of a job that reconcile decides by, read once per pass from the API model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerotrain.operator.api import ZeroTrainingJobSpec, ZeroTrainingJobStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class JobIdentity:
    """Which object, in which of its lives."""

    namespace: str
    name: str
    uid: str
    generation: int
    deleting: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """One job as stored: identity, typed spec and typed status."""

    identity: JobIdentity
    spec: ZeroTrainingJobSpec
    status: ZeroTrainingJobStatus


def identity_of(job: Mapping[str, Any]) -> JobIdentity:
    meta = job["metadata"]
    return JobIdentity(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=int(meta.get("generation", 0)),
        deleting=meta.get("deletionTimestamp") is not None,
    )
