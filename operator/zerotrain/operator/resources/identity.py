"""Names, labels and owner of the objects of a job: how the operator finds them again after a restart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import (
    API_VERSION,
    APP_NAME,
    COMPONENT_OPERATOR,
    COMPONENT_WORKER,
    FIELD_MANAGER,
    KIND,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_RANK,
)

Json: TypeAlias = dict[str, Any]
"""An object as the API server takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceOptions:
    """What the objects of every job depend on beyond the job: how this operator was installed."""

    operator_namespace: str = "zerotrain-system"
    """Namespace of the operator's pods; their HTTP calls to the workers are let in."""

    operator_labels: Mapping[str, str] = field(
        default_factory=lambda: {
            "app.kubernetes.io/name": APP_NAME,
            "app.kubernetes.io/component": COMPONENT_OPERATOR,
        }
    )
    """Labels of the operator's pods."""

    monitoring_namespace: str = "monitoring"
    """Namespace whose pods may scrape the workers' metrics."""

    dns_namespace: str = "kube-system"
    dns_labels: Mapping[str, str] = field(default_factory=lambda: {"k8s-app": "kube-dns"})
    """Pods that answer DNS; the only destination outside the job that workers may reach by default."""

    dns_cidrs: tuple[str, ...] = ()
    """Networks that answer DNS without being pods, such as a cache on every node (169.254.20.10/32)."""

    extra_egress_cidrs: tuple[str, ...] = ()
    """Further destinations for every worker, such as an object store: networks in CIDR form, all ports."""

    allowed_egress_cidrs: tuple[str, ...] = ()
    """What jobs may ask for in spec.network, each for its own pods."""

    extra_http_cidrs: tuple[str, ...] = ()
    """Networks that may call the workers' HTTP, such as the API server's when the operator runs outside."""

    image_pull_policy: str | None = None
    """imagePullPolicy of the worker container; Kubernetes' own default when None."""

    rendezvous_timeout_s: float = 300.0
    """How long a worker waits for the others before it exits with RENDEZVOUS_TIMEOUT."""


def pod_name(job_name: str, attempt: int, index: int) -> str:
    """Never used twice: the attempt is part of it."""
    return f"{job_name}-{attempt}-{index}"


def secret_name(job: ZeroTrainingJob, attempt: int) -> str:
    """One per attempt: a node may still hold the content of another one's under the same name. One per life
    of the job and per spec, too: what is there by that name already is never read, so it must be the same."""
    made_from = f"{job.uid}/{job.shape.frozen_hash}"
    return f"{job.name}-{attempt}-files-{hashlib.sha256(made_from.encode()).hexdigest()[:8]}"


def selector(job: ZeroTrainingJob) -> dict[str, str]:
    """Labels that the pods of this job carry and no other pod does, whatever the attempt."""
    return {LABEL_JOB: job.name, LABEL_JOB_UID: job.uid}


def shared_labels() -> dict[str, str]:
    """Of what belongs to no single job, and to every job's objects besides their own."""
    return {
        "app.kubernetes.io/name": APP_NAME,
        "app.kubernetes.io/component": COMPONENT_WORKER,
        "app.kubernetes.io/part-of": APP_NAME,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def common_labels(job: ZeroTrainingJob) -> dict[str, str]:
    return {**shared_labels(), "app.kubernetes.io/instance": job.name, **selector(job)}


def attempt_labels(job: ZeroTrainingJob, attempt: int) -> dict[str, str]:
    return {**common_labels(job), LABEL_ATTEMPT: str(attempt)}


def worker_labels(job: ZeroTrainingJob, attempt: int, index: int) -> dict[str, str]:
    """Those by which somebody looks for pods; each more costs the API server at every write of every pod."""
    return {
        "app.kubernetes.io/name": APP_NAME,
        "app.kubernetes.io/component": COMPONENT_WORKER,
        **selector(job),
        LABEL_ATTEMPT: str(attempt),
        LABEL_RANK: str(index),
    }


def metadata(job: ZeroTrainingJob, name: str, labels: Mapping[str, str]) -> Json:
    """Metadata of an object that goes when the job goes."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": dict(labels),
        "ownerReferences": [_owner_reference(job)],
    }


def _owner_reference(job: ZeroTrainingJob) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        # True would need the permission to set finalizers on jobs, and nothing waits for our objects.
        "blockOwnerDeletion": False,
    }
