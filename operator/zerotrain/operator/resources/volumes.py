"""The operator's volumes of a worker pod: configuration and token, scratch, shared memory, NVMe, checkpoints;
and the limits on what a worker keeps on its node's local disk.

`pod.py` adds the volumes of podTemplate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from zerotrain.contract.train_spec import CONFIG_FILE
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.base import ApiModel
from zerotrain.operator.api.core.volumes import EmptyDirMedium, EmptyDirSource
from zerotrain.operator.api.quantity import Quantity, format_bytes
from zerotrain.operator.api.storage import Nvme, Scratch
from zerotrain.operator.constants import (
    CHECKPOINT_MOUNT,
    CONFIG_DIR,
    RESERVED_PREFIX,
    SCRATCH_DIR,
    SHARED_MEMORY_DIR,
    TOKEN_KEY,
)

from .identity import Json, secret_name
from .secret import config_files

_OWNER_READS = 0o400


@dataclass(frozen=True, kw_only=True, slots=True)
class MountedVolume:
    """A volume of the pod and its mount path in the worker container."""

    name: str
    mount_path: str
    source: Json
    """The volume's source, such as {"emptyDir": {}}."""

    read_only: bool = False

    @property
    def volume(self) -> Json:
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> Json:
        mount: Json = {"name": self.name, "mountPath": self.mount_path}
        if self.read_only:
            mount["readOnly"] = True
        return mount


def own_volumes(job: ZeroTrainingJob, attempt: int) -> tuple[MountedVolume, ...]:
    """Return the operator's volumes of one worker; all names start with the reserved prefix."""
    volumes = [_files(job, attempt), _scratch(job)]
    resources = job.spec.resources
    if resources is not None and resources.shared_memory is not None:
        volumes.append(_shared_memory(resources.shared_memory))
    if job.spec.nvme is not None:
        volumes.append(_nvme(job.spec.nvme))
    if job.spec.checkpoint is not None:
        stored = job.spec.checkpoint.volume
        volumes.append(
            MountedVolume(
                name=f"{RESERVED_PREFIX}checkpoint",
                mount_path=CHECKPOINT_MOUNT,
                source=limited(stored, as_written(stored), job),
            )
        )
    return tuple(volumes)


def as_written(part: ApiModel) -> Json:
    """Return a part of the spec under Kubernetes' own field names, with only what the user wrote."""
    written: Any = part.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return dict(written)


def _files(job: ZeroTrainingJob, attempt: int) -> MountedVolume:
    """Return configuration and token in one folder, even if ds_config.json comes from the user's
    ConfigMap."""
    secret, reference = secret_name(job, attempt), job.spec.config_from
    source: Json = {"secret": {"secretName": secret, "defaultMode": _OWNER_READS}}
    if reference is not None:
        key = reference.config_map_key_ref
        theirs = {"name": key.name, "items": [{"key": key.key, "path": CONFIG_FILE}]}
        own = [{"key": name, "path": name} for name in sorted((*config_files(job), TOKEN_KEY))]
        sources = [{"secret": {"name": secret, "items": own}}, {"configMap": theirs}]
        source = {"projected": {"sources": sources, "defaultMode": _OWNER_READS}}
    return MountedVolume(name=f"{RESERVED_PREFIX}job", mount_path=CONFIG_DIR, source=source, read_only=True)


def _scratch(job: ZeroTrainingJob) -> MountedVolume:
    """Return the only writable folder besides the user's volumes: the root file system is read-only."""
    source = {"emptyDir": {"sizeLimit": str(scratch_size(job))}}
    return MountedVolume(name=f"{RESERVED_PREFIX}tmp", mount_path=SCRATCH_DIR, source=source)


def _shared_memory(size: str) -> MountedVolume:
    return MountedVolume(
        name=f"{RESERVED_PREFIX}shm",
        mount_path=SHARED_MEMORY_DIR,
        source={"emptyDir": {"medium": "Memory", "sizeLimit": str(size)}},
    )


def _nvme(nvme: Nvme) -> MountedVolume:
    if nvme.storage_class_name is None:
        source: Json = {"emptyDir": {"sizeLimit": str(nvme.size)}}
    else:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": nvme.storage_class_name,
            "resources": {"requests": {"storage": str(nvme.size)}},
        }
        source = {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    return MountedVolume(name=f"{RESERVED_PREFIX}nvme", mount_path=nvme.mount_path, source=source)


DEFAULT_SCRATCH_SIZE: Final = Quantity("50Gi")
"""Default limit of one folder: the files of a model of about 20 billion parameters, and caches of compiled
kernels."""

LOG_BYTES: Final = 2 << 30
"""Bytes allowed besides the folders: logs, and what containers with a writable root write there."""

EPHEMERAL_STORAGE: Final = "ephemeral-storage"


def scratch_size(job: ZeroTrainingJob) -> Quantity:
    """Return the limit of each folder on the node's disk that has no limit of its own."""
    return _given_scratch(job).size or DEFAULT_SCRATCH_SIZE


def ephemeral_limit(job: ZeroTrainingJob) -> str:
    """Return the limit of everything that the worker keeps on the node's disk. Without it, one pod that fills
    the disk causes the eviction of other pods on the node."""
    given = _given_scratch(job).ephemeral_storage
    if given is not None:
        return str(given)
    size = scratch_size(job).num_bytes
    folders = [size, *(_folder_bytes(folder, size) for folder in _on_disk(job))]
    nvme = job.spec.nvme
    if nvme is not None and nvme.storage_class_name is None:
        folders.append(nvme.size.num_bytes)
    return format_bytes(sum(folders) + LOG_BYTES)


def limited(volume: ApiModel, written: Json, job: ZeroTrainingJob) -> Json:
    """Return the volume as written, with a limit added to a folder on the node's disk that has none."""
    folder = getattr(volume, "empty_dir", None)
    if folder is None or not _is_on_disk(folder) or folder.size_limit is not None:
        return written
    return {**written, "emptyDir": {**written["emptyDir"], "sizeLimit": str(scratch_size(job))}}


def _given_scratch(job: ZeroTrainingJob) -> Scratch:
    return job.spec.scratch or Scratch()


def _on_disk(job: ZeroTrainingJob) -> list[EmptyDirSource]:
    template, checkpoint = job.spec.pod_template, job.spec.checkpoint
    folders = [volume.empty_dir for volume in template.volumes] if template is not None else []
    folders.append(checkpoint.volume.empty_dir if checkpoint is not None else None)
    return [folder for folder in folders if folder is not None and _is_on_disk(folder)]


def _is_on_disk(folder: EmptyDirSource) -> bool:
    return folder.medium is not EmptyDirMedium.MEMORY


def _folder_bytes(folder: EmptyDirSource, size: int) -> int:
    return folder.size_limit.num_bytes if folder.size_limit is not None else size
