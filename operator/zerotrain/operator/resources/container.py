"""The worker container: the launcher, its environment, resources, ports, probe and security context."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zerotrain.contract.launch_command import begins_with_launch
from zerotrain.contract.train_spec import CONFIG_FILE, TRAIN_SPEC_FILE
from zerotrain.contract.variables import is_reserved, settings_in
from zerotrain.contract.worker_environment import (
    TERMINATION_LOG,
    WORKER_HTTP_PORT,
    LaunchSpec,
    grace_of_ranks,
)
from zerotrain.contract.worker_http import READY_PATH
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.core.containers import ContainerUser
from zerotrain.operator.api.storage import Checkpoint
from zerotrain.operator.constants import (
    CHECKPOINT_MOUNT,
    CONFIG_DIR,
    CONTAINER_NAME,
    HTTP_PORT_NAME,
    SCRATCH_DIR,
    TOKEN_KEY,
)

from .identity import Json, ResourceOptions, pod_name
from .network import domain
from .secret import train_spec
from .volumes import EPHEMERAL_STORAGE, MountedVolume, as_written, ephemeral_limit

LAUNCHER: Final = ("python", "-m", "zerotrain.runtime.launch")
DEFAULT_GRACE_S: Final = 30
"""Grace period in seconds of a job without a checkpoint: the Kubernetes default, since there is nothing to
save."""

HUB_TOKEN: Final = "HF_TOKEN"
"""Variable in which the Hugging Face libraries look for the token of the hub."""

HANG_BACKSTOP_S: Final = 31 * 86_400.0
"""Seconds after which ranks that wait for each other end by themselves.

It is longer than any limit of `reconcile.hangs`. Those limits are learned from the attempt, may change while
it runs and are at most 30 days. Only the operator sees which rank blocks the others; a rank that ended
earlier would be blamed in its place.
"""


def worker_container(
    job: ZeroTrainingJob, options: ResourceOptions, volumes: tuple[MountedVolume, ...]
) -> Json:
    """Return the worker container, without its environment. It is the container that `kubectl logs` shows.

    The mounts of podTemplate are merged in.
    """
    container: Json = {
        "name": CONTAINER_NAME,
        "image": job.spec.image,
        "command": list(LAUNCHER),
        "resources": _resources(job),
        # The port has a name for scrapers that select it by name; other ports are open without being listed.
        "ports": [{"name": HTTP_PORT_NAME, "containerPort": WORKER_HTTP_PORT, "protocol": "TCP"}],
        "readinessProbe": {
            "httpGet": {"path": READY_PATH, "port": HTTP_PORT_NAME},
            "periodSeconds": 3,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "terminationMessagePath": TERMINATION_LOG,
        # A launcher that was killed wrote no message; the last log lines then show the reason.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": worker_security_context(job),
        "volumeMounts": [volume.mount for volume in volumes],
    }
    if job.spec.program:  # otherwise the launcher starts the built-in trainer
        container["args"] = ["--", *job.spec.program]
    template = job.spec.pod_template
    if template is not None:
        container["volumeMounts"] += [as_written(mount) for mount in template.volume_mounts]
        if template.env_from:
            container["envFrom"] = [as_written(source) for source in template.env_from]
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    return container


def grace_period_s(job: ZeroTrainingJob) -> int:
    """Return the seconds from the stop request to SIGKILL."""
    checkpoint = job.spec.checkpoint
    return checkpoint.grace_period_seconds if checkpoint is not None else DEFAULT_GRACE_S


def hang_backstop_s(job: ZeroTrainingJob) -> float | None:
    """Return HANG_BACKSTOP_S if the operator judges hangs; None leaves the ranks to the engine's own
    timeouts.

    The built-in trainer always reports its progress, and so does a script of `zerotrain launch` that uses the
    engine. Whether another user program does is not known in advance, and for one that does not, the engine's
    watchdog is the only protection. So such a program needs a hangPolicy, which may be empty.
    """
    reports = not job.spec.program or begins_with_launch(job.spec.program)
    return HANG_BACKSTOP_S if reports or job.spec.hang_policy is not None else None


def launch_spec(job: ZeroTrainingJob, attempt: int, options: ResourceOptions) -> LaunchSpec:
    """Return the launch specification of worker 0; the other workers differ only in node_rank."""
    spec = job.spec
    nvme = spec.nvme
    return LaunchSpec(
        job=job.name,
        job_uid=job.uid,
        attempt=attempt,
        master_addr=master_address(job, attempt),
        world_size=job.world_size,
        node_rank=0,
        ranks_per_worker=spec.num_ranks_per_worker,
        num_gpus=spec.num_gpus or None,
        config_path=Path(CONFIG_DIR, CONFIG_FILE),
        train_spec_path=Path(CONFIG_DIR, TRAIN_SPEC_FILE) if train_spec(job) is not None else None,
        checkpoint_dir=checkpoint_dir(job),
        nvme_path=Path(nvme.mount_path) if nvme is not None else None,
        nvme_bytes=nvme.size.num_bytes if nvme is not None else None,
        nvme_volume=Path(nvme.mount_path) if nvme is not None else None,
        nvme_encryption=nvme.encryption.value if nvme is not None and nvme.encryption is not None else None,
        token_path=Path(CONFIG_DIR, TOKEN_KEY),
        grace_seconds=grace_of_ranks(grace_period_s(job)),
        rendezvous_timeout_seconds=options.rendezvous_timeout_s,
        hang_backstop_seconds=hang_backstop_s(job),
        run_dir=Path(SCRATCH_DIR, "zerotrain"),
    )


def checkpoint_dir(job: ZeroTrainingJob) -> Path | None:
    """Return the job's folder on the checkpoint volume, as the worker sees it; None without checkpoints."""
    checkpoint = job.spec.checkpoint
    return checkpoint_folder(job.namespace, job.name, checkpoint) if checkpoint is not None else None


def checkpoint_folder(namespace: str, name: str, checkpoint: Checkpoint) -> Path:
    """Return the checkpoint folder of the job with this namespace and name, as `checkpoint_dir` does."""
    # A claim belongs to one namespace; an NFS export may serve jobs of the same name in several namespaces.
    tenant = [namespace] if checkpoint.volume.nfs is not None else []
    return Path(CHECKPOINT_MOUNT, *tenant, name)


def master_address(job: ZeroTrainingJob, attempt: int) -> str:
    """Return the name of worker 0's pod, which is stable within the attempt; a single worker needs no DNS."""
    subdomain = domain(job)
    # The name is short, so that the search domain of the namespace resolves it with the first query.
    return f"{pod_name(job.name, attempt, 0)}.{subdomain}" if subdomain is not None else "127.0.0.1"


def environment(job: ZeroTrainingJob, launch: LaunchSpec) -> list[Json]:
    """Return the environment of the worker container.

    podTemplate may replace variables that are not reserved. Its values for `SETTABLE` variables are merged
    into the launch variables.
    """
    merged: dict[str, Json] = {
        # Libraries that require a cache folder find a writable one there.
        "HOME": {"name": "HOME", "value": SCRATCH_DIR},
    }
    given = job.spec.pod_template.env if job.spec.pod_template is not None else ()
    token = job.spec.finetune.token_from if job.spec.finetune is not None else None
    if token is not None:
        merged[HUB_TOKEN] = {"name": HUB_TOKEN, "valueFrom": {"secretKeyRef": as_written(token)}}
    merged |= {item.name: as_written(item) for item in given if not is_reserved(item.name)}
    settings = settings_in({item.name: item.value or "" for item in given})
    merged |= {name: {"name": name, "value": value} for name, value in launch.to_variable(settings).items()}
    return list(merged.values())


def _resources(job: ZeroTrainingJob) -> Json:
    """Return the resources of the worker container.

    Requests equal limits, because a worker that is throttled or evicted stops all others. The disk is an
    exception.
    """
    resources = job.spec.resources
    limits: dict[str, str] = {}
    if resources is not None:
        if resources.cpu is not None:
            limits["cpu"] = str(resources.cpu)
        if resources.memory is not None:
            limits["memory"] = str(resources.memory)
        if resources.gpus is not None:
            limits[resources.gpus.resource_name] = str(resources.gpus.count)
        if resources.rdma is not None:
            limits[resources.rdma.resource_name] = str(resources.rdma.count)
    requests = dict(limits)
    limits[EPHEMERAL_STORAGE] = ephemeral_limit(job)
    nvme = job.spec.nvme
    spilled = nvme is not None and nvme.storage_class_name is None
    # The request lets the scheduler find a node with space for the volume. The rest of the disk has only a
    # limit: without an explicit request the limit would count as one, and no node has space for what few
    # programs use.
    requests[EPHEMERAL_STORAGE] = str(nvme.size) if nvme is not None and spilled else "0"
    return {"limits": limits, "requests": requests}


IPC_LOCK: Final = "IPC_LOCK"
"""The only capability that a worker may request."""

WORKER_USER: Final = 65532
"""User ID of "nonroot" in the common base images and in the runtime image."""


def pod_security_context() -> Json:
    """Return a security context by Pod Security "restricted"."""
    return {
        "runAsNonRoot": True,
        "runAsUser": WORKER_USER,
        "runAsGroup": WORKER_USER,
        "fsGroup": WORKER_USER,
        # A checkpoint volume may hold a million files: change their group once, not at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def worker_security_context(job: ZeroTrainingJob) -> Json:
    """Return the security context of the worker container. Only RDMA needs more than "restricted" allows: it
    pins the memory that its devices access."""
    context = container_security_context()
    resources = job.spec.resources
    if resources is not None and resources.rdma is not None:
        context["capabilities"] = {**context["capabilities"], "add": [IPC_LOCK]}
    return context


def container_security_context(user: ContainerUser | None = None) -> Json:
    """Return the security context of a container; `user` is the part that podTemplate may set for its
    containers."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        **(as_written(user) if user is not None else {}),
    }
