"""The one-shot pod that verifies a checkpoint. It has the job's image and placement, and no GPU.

It mounts the job's checkpoint volume read-only.
"""

from __future__ import annotations

from typing import Final

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.constants import CHECKPOINT_MOUNT, LABEL_HELPER, RESERVED_PREFIX, SCRATCH_DIR

from .container import checkpoint_dir, container_security_context, pod_security_context
from .identity import Json, ResourceOptions, common_labels, metadata
from .volumes import as_written

HELPER: Final = "verify"
"""Value of LABEL_HELPER and name of the container."""

COMMAND: Final = ("python", "-m", "zerotrain.cli", "checkpoint", "verify")

RESOURCES: Final[Json] = {
    "requests": {"cpu": "250m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "2Gi"},
}
"""Resources of the pod. Files are read in pieces; the manifest of a model with many parameters needs the
memory.

Limits are set because a quota on `limits.cpu` rejects pods without one.
"""


def verification_pod_name(job_name: str, attempt: int, number: int) -> str:
    """Return the name of the pod of try `number` to verify the checkpoint of `attempt`.

    It differs from the names of workers, whose index is never a word.
    """
    return f"{job_name}-{attempt}-{HELPER}-{number}"


def verification_pod(
    job: ZeroTrainingJob, name: str, checkpoint: str, limit_s: int, options: ResourceOptions
) -> Json:
    """Return the verification pod. Raises ValueError without a checkpoint volume.

    The job's selector matches the pod, so that the job's NetworkPolicy applies to it. The pod has neither
    attempt nor rank, so that no deletion, disruption budget or gang of an attempt takes it for a worker.
    """
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
        # The last lines of the log say what is wrong.
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
    """Return the placement of the workers: on those nodes the volume can be mounted and the image pulled."""
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
