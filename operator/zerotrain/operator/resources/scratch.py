"""Limits on what a worker keeps on its node's local disk.

Without them, one pod that fills the disk causes the eviction of other pods on the node.
"""

from __future__ import annotations

from typing import Final

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.base import ApiModel
from zerotrain.operator.api.core.volumes import EmptyDirMedium, EmptyDirSource
from zerotrain.operator.api.quantity import Quantity, format_bytes
from zerotrain.operator.api.storage import Scratch

from .identity import Json

DEFAULT_SIZE: Final = Quantity("50Gi")
"""Default limit of one folder: the files of a model of about 20 billion parameters, and caches of compiled
kernels."""

LOG_BYTES: Final = 2 << 30
"""Bytes allowed besides the folders: logs, and what containers with a writable root write there."""

EPHEMERAL_STORAGE: Final = "ephemeral-storage"


def scratch_size(job: ZeroTrainingJob) -> Quantity:
    """Return the limit of each folder on the node's disk that has no limit of its own."""
    return _given(job).size or DEFAULT_SIZE


def ephemeral_limit(job: ZeroTrainingJob) -> str:
    """Return the limit of everything that the worker keeps on the node's disk."""
    given = _given(job).ephemeral_storage
    if given is not None:
        return str(given)
    size = scratch_size(job).num_bytes
    folders = [size, *(_bytes(folder, size) for folder in _on_disk(job))]
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


def _given(job: ZeroTrainingJob) -> Scratch:
    return job.spec.scratch or Scratch()


def _on_disk(job: ZeroTrainingJob) -> list[EmptyDirSource]:
    template, checkpoint = job.spec.pod_template, job.spec.checkpoint
    folders = [volume.empty_dir for volume in template.volumes] if template is not None else []
    folders.append(checkpoint.volume.empty_dir if checkpoint is not None else None)
    return [folder for folder in folders if folder is not None and _is_on_disk(folder)]


def _is_on_disk(folder: EmptyDirSource) -> bool:
    return folder.medium is not EmptyDirMedium.MEMORY


def _bytes(folder: EmptyDirSource, size: int) -> int:
    return folder.size_limit.num_bytes if folder.size_limit is not None else size
