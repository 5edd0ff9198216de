"""The worker container: the launcher, its environment, resources, ports and probe."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zerotrain.contract.launch import TERMINATION_LOG, WORKER_HTTP_PORT, LaunchSpec, grace_of_ranks
from zerotrain.contract.train_spec import CONFIG_FILE, TRAIN_SPEC_FILE
from zerotrain.contract.variables import is_reserved, settings_in
from zerotrain.contract.worker_http import READY_PATH
from zerotrain.operator.api import ZeroTrainingJob
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
from .scratch import EPHEMERAL_STORAGE, ephemeral_limit
from .security import worker_security_context
from .service import domain
from .volumes import MountedVolume, as_written, has_train_spec

LAUNCHER: Final = ("python", "-m", "zerotrain.runtime.launch")
DEFAULT_GRACE_S: Final = 30
"""Grace of a job without a checkpoint: Kubernetes' own default, since there is nothing to save."""

HANG_BACKSTOP_S: Final = 31 * 86_400.0
"""Seconds after which ranks that wait for each other give up by themselves: later than any limit of
`reconcile.hangs`, which are learned from the attempt, may be changed while it runs and end at 30 days. Only
the operator sees which rank holds up the others; one that gave up before it would be blamed in its place."""


def worker_container(
    job: ZeroTrainingJob, options: ResourceOptions, volumes: tuple[MountedVolume, ...]
) -> Json:
    """The container that `kubectl logs` shows without its environment; podTemplate's mounts are merged in."""
    container: Json = {
        "name": CONTAINER_NAME,
        "image": job.spec.image,
        "command": list(LAUNCHER),
        **_program(job),
        "resources": _resources(job),
        # For those who scrape by the port's name; the other ports need no word to be open.
        "ports": [{"name": HTTP_PORT_NAME, "containerPort": WORKER_HTTP_PORT, "protocol": "TCP"}],
        "readinessProbe": {
            "httpGet": {"path": READY_PATH, "port": HTTP_PORT_NAME},
            "periodSeconds": 3,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "terminationMessagePath": TERMINATION_LOG,
        # A launcher that was killed wrote no message: then the last log lines tell why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": worker_security_context(job),
        "volumeMounts": [volume.mount for volume in volumes],
    }
    template = job.spec.pod_template
    if template is not None:
        container["volumeMounts"] += [as_written(mount) for mount in template.volume_mounts]
        if template.env_from:
            container["envFrom"] = [as_written(source) for source in template.env_from]
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    return container


def grace_period_s(job: ZeroTrainingJob) -> int:
    """Seconds from the request to stop to SIGKILL."""
    checkpoint = job.spec.checkpoint
    return checkpoint.grace_period_seconds if checkpoint is not None else DEFAULT_GRACE_S


def hang_backstop_s(job: ZeroTrainingJob) -> float | None:
    """HANG_BACKSTOP_S where the operator judges hangs; None leaves the ranks to the engine's own timeouts.

    The built-in trainer always reports. Whether a program of the user's does nobody knows before, and the
    engine's watchdog is all that one has which does not. So there it takes a hangPolicy, be it empty.
    """
    return None if job.spec.command and job.spec.hang_policy is None else HANG_BACKSTOP_S


def launch_spec(job: ZeroTrainingJob, attempt: int, options: ResourceOptions) -> LaunchSpec:
    """What the launcher of worker 0 is told; the others differ in node_rank."""
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
        config_path=Path(CONFIG_DIR, CONFIG_FILE),
        train_spec_path=Path(CONFIG_DIR, TRAIN_SPEC_FILE) if has_train_spec(job) else None,
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
    """The job's own folder of the checkpoint volume, as the worker sees it; None without checkpoints."""
    checkpoint = job.spec.checkpoint
    return checkpoint_folder(job.namespace, job.name, checkpoint) if checkpoint is not None else None


def checkpoint_folder(namespace: str, name: str, checkpoint: Checkpoint) -> Path:
    """As `checkpoint_dir`, of the job of that name."""
    # A claim belongs to one namespace; an NFS export may serve jobs of the same name in several.
    tenant = [namespace] if checkpoint.volume.nfs is not None else []
    return Path(CHECKPOINT_MOUNT, *tenant, name)


def master_address(job: ZeroTrainingJob, attempt: int) -> str:
    """Name of worker 0's pod, stable within the attempt; a single worker needs no DNS to find itself."""
    subdomain = domain(job)
    # Short, so that the namespace's own search domain answers it with the first query.
    return f"{pod_name(job.name, attempt, 0)}.{subdomain}" if subdomain is not None else "127.0.0.1"


def _program(job: ZeroTrainingJob) -> Json:
    """The launcher starts the built-in trainer when it is given no program."""
    if not job.spec.command:
        return {}
    return {"args": ["--", *job.spec.command, *job.spec.args]}


def environment(job: ZeroTrainingJob, launch: LaunchSpec) -> list[Json]:
    """podTemplate may replace what is not reserved; what it says of `SETTABLE` is folded in with the rest."""
    merged: dict[str, Json] = {
        # Libraries that insist on a cache folder find a writable one there.
        "HOME": {"name": "HOME", "value": SCRATCH_DIR},
    }
    given = job.spec.pod_template.env if job.spec.pod_template is not None else ()
    merged |= {item.name: as_written(item) for item in given if not is_reserved(item.name)}
    settings = settings_in({item.name: item.value or "" for item in given})
    merged |= {name: {"name": name, "value": value} for name, value in launch.to_variable(settings).items()}
    return list(merged.values())


def _resources(job: ZeroTrainingJob) -> Json:
    """Requests equal limits: a worker that is throttled or evicted stops all others. The disk is another
    matter."""
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
    # Lets the scheduler find a node with room for the volume. The rest is a limit alone: without a request of
    # its own it would be one, too, and no node has room for what few programs use.
    requests[EPHEMERAL_STORAGE] = str(nvme.size) if nvme is not None and spilled else "0"
    return {"limits": limits, "requests": requests}
