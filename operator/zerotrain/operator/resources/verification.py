"""The one-shot pod that verifies a checkpoint: the job's image and placement, its volume read-only, no
GPU."""

from __future__ import annotations

from typing import Final

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import (
    CHECKPOINT_MOUNT,
    LABEL_HELPER,
    RESERVED_PREFIX,
    SCRATCH_DIR,
)

from .container import checkpoint_dir
from .identity import Json, ResourceOptions, common_labels, metadata
from .security import container_security_context, pod_security_context
from .volumes import as_written

HELPER: Final = "verify"
"""Value of LABEL_HELPER and name of the container."""

COMMAND: Final = ("python", "-m", "zerotrain.cli", "checkpoint", "verify")

RESOURCES: Final[Json] = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "2Gi"},
}
"""Files are read in pieces; the manifest of a model with many parameters is what needs the memory. A quota on
`limits.cpu` refuses pods that give none."""


def verification_pod_name(job_name: str, attempt: int, number: int) -> str:
    """Try `number` of verifying what `attempt` left; no worker's index is a word."""
    return f"{job_name}-{attempt}-{HELPER}-{number}"


def verification_pod(
    job: ZeroTrainingJob, name: str, checkpoint: str, limit_s: int, options: ResourceOptions
) -> Json:
    """The job's selector applies to it, so that its NetworkPolicy does; it has neither attempt nor rank, so
    that no deletion, budget or gang of an attempt takes it for a worker. Raises ValueError without a
    checkpoint volume."""
    folder, stored = checkpoint_dir(job), job.spec.checkpoint
    if folder is None or stored is None:
        raise ValueError(f"job {job.name} has no checkpoint volume to verify")
    volume, scratch = f"{RESERVED_PREFIX}checkpoint", f"{RESERVED_PREFIX}tmp"
    container: Json = {
        "name": HELPER,
        "image": job.spec.image,
        "command": [*COMMAND, str(folder), checkpoint],
        "env": [{"name": "HOME", "value": SCRATCH_DIR}, {"name": "TERM", "value": "dumb"}],
        "resources": RESOURCES,
        # What is wrong is in the last lines of the log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
        "volumeMounts": [
            {"name": volume, "mountPath": CHECKPOINT_MOUNT, "readOnly": True},
            {"name": scratch, "mountPath": SCRATCH_DIR},
        ],
    }
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    spec: Json = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": limit_s,
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security_context(),
        "volumes": [
            {"name": volume, **as_written(stored.volume)},
            {"name": scratch, "emptyDir": {"sizeLimit": "64Mi"}},
        ],
        "containers": [container],
        **_placement(job),
    }
    labels = {**common_labels(job), "app.kubernetes.io/component": HELPER, LABEL_HELPER: HELPER}
    meta = metadata(job, name, {**_given_labels(job), **labels})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _placement(job: ZeroTrainingJob) -> Json:
    """Where the workers may run the volume can be mounted and the image be pulled."""
    placed: Json = {}
    scheduling, template = job.spec.scheduling, job.spec.pod_template
    if scheduling is not None:
        if scheduling.node_selector:
            placed["nodeSelector"] = dict(scheduling.node_selector)
        if scheduling.tolerations:
            placed["tolerations"] = [as_written(toleration) for toleration in scheduling.tolerations]
    if template is not None:
        if template.image_pull_secrets:
            placed["imagePullSecrets"] = [as_written(item) for item in template.image_pull_secrets]
        if template.service_account_name is not None:
            placed["serviceAccountName"] = template.service_account_name
    return placed


def _given_labels(job: ZeroTrainingJob) -> dict[str, str]:
    template = job.spec.pod_template
    return dict(template.labels or {}) if template is not None else {}
