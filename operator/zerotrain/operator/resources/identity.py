"""Names, labels and owner of the objects of a job, by which the operator finds them after a restart."""

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
"""An object in the form that the API server accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceOptions:
    """The options of the operator's installation that affect the objects of every job."""

    operator_namespace: str = "zerotrain-system"
    """Namespace of the operator's pods, whose HTTP calls to the workers are allowed."""

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
    """Labels of the pods that answer DNS, the only destination outside the job that workers may reach by
    default."""

    dns_cidrs: tuple[str, ...] = ()
    """Networks that answer DNS without being pods, such as a cache on every node (169.254.20.10/32)."""

    extra_egress_cidrs: tuple[str, ...] = ()
    """Further destinations for every worker, such as an object store: networks in CIDR form, all ports."""

    allowed_egress_cidrs: tuple[str, ...] = ()
    """Networks that jobs may request in spec.network, each for its own pods."""

    extra_http_cidrs: tuple[str, ...] = ()
    """Networks that may call the workers' HTTP port, such as the API server's if the operator runs
    outside."""

    image_pull_policy: str | None = None
    """imagePullPolicy of the worker container; the Kubernetes default if None."""

    rendezvous_timeout_s: float = 300.0
    """Seconds that a worker waits for the others before it exits with RENDEZVOUS_TIMEOUT."""


def pod_name(job_name: str, attempt: int, index: int) -> str:
    """Return the name of a worker's pod. No name is used twice, because it contains the attempt."""
    return f"{job_name}-{attempt}-{index}"


def secret_name(job: ZeroTrainingJob, attempt: int) -> str:
    """Return the name of the attempt's Secret.

    The name differs per attempt, because a node may still cache the content of another attempt's Secret under
    the same name. It also differs per job UID and per spec: a Secret that already exists is never read, so
    its name must imply the same content.
    """
    made_from = f"{job.uid}/{job.shape.frozen_hash}"
    return f"{job.name}-{attempt}-files-{hashlib.sha256(made_from.encode()).hexdigest()[:8]}"


def selector(job: ZeroTrainingJob) -> dict[str, str]:
    """Return the labels that all pods of this job, and no other pods, carry in every attempt."""
    return {LABEL_JOB: job.name, LABEL_JOB_UID: job.uid}


def shared_labels() -> dict[str, str]:
    """Return the labels of objects that belong to no single job. The objects of every job carry them as
    well."""
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
    """Return the labels by which pods are looked up. Each further label costs the API server at every pod
    write."""
    return {
        "app.kubernetes.io/name": APP_NAME,
        "app.kubernetes.io/component": COMPONENT_WORKER,
        **selector(job),
        LABEL_ATTEMPT: str(attempt),
        LABEL_RANK: str(index),
    }


def metadata(job: ZeroTrainingJob, name: str, labels: Mapping[str, str]) -> Json:
    """Return the metadata of an object that is deleted with the job."""
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
