"""Rules between the job's NVMe volume and the spill that its configuration asks for; called by admission.

A spill to another place than the volume would fill the container's own disk, and the kubelet cannot see it
there: its file has no name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.planner import Limit

from .paths import PATH_RULE, is_plain
from .quantity import format_bytes
from .refusal import Refusal, invalid
from .spec import ZeroTrainingJobSpec
from .storage import Encryption, Nvme

_ZERO = "spec.config.zero_optimization"


def spill_refusals(spec: ZeroTrainingJobSpec, config: EngineConfig) -> Iterator[Refusal]:
    """Yield contradictions between the configuration and `spec.nvme`; none if nothing is offloaded to
    nvme."""
    blocks = {"offload_optimizer": config.zero.offload_optimizer, "offload_param": config.zero.offload_param}
    spilled = {name: block for name, block in blocks.items() if block is not None and block.device == "nvme"}
    for name, block in spilled.items():
        path = f"{_ZERO}.{name}"
        if spec.nvme is None:
            yield invalid(
                "spec.nvme", f"{path}.device is nvme, but the job asks for no volume; add spec.nvme"
            )
        elif block.nvme_path is not None and block.nvme_path.rstrip("/") != spec.nvme.mount_path:
            yield invalid(
                f"{path}.nvme_path",
                f"{block.nvme_path} is not spec.nvme.mountPath {spec.nvme.mount_path}; "
                "remove nvme_path or make them equal",
            )
    if spilled and spec.nvme is not None:
        yield from _folders(spec.nvme, config)
        yield from _encryption(spec.nvme, config)
        yield from _bytes(spec, spec.nvme, config)


def spill_limit(max_bytes: int, ranks: int) -> Limit:
    """Return the limit that `spill.max_bytes` of the configuration sets for a worker with `ranks` ranks."""
    return Limit(num_bytes=max_bytes * ranks, source=f"spill.max_bytes {format_bytes(max_bytes)} per rank")


def _folders(nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
    mount = PurePosixPath(nvme.mount_path)
    for folder in config.zero.spill.paths:
        if not is_plain(folder):
            yield invalid(f"{_ZERO}.spill.paths", f"{folder!r} {PATH_RULE}")
        elif not PurePosixPath(folder).is_relative_to(mount):
            yield invalid(
                f"{_ZERO}.spill.paths",
                f"{folder} is not on spec.nvme.mountPath {nvme.mount_path}; name folders below it, or remove "
                "spill.paths",
            )


def _encryption(nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
    asked = config.zero.spill.encryption
    if asked is not None and nvme.encryption is not None and Encryption(asked) is not nvme.encryption:
        yield invalid(
            f"{_ZERO}.spill.encryption",
            f"{asked} is not spec.nvme.encryption {nvme.encryption.value}; give it in one place only",
        )


def _bytes(spec: ZeroTrainingJobSpec, nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
    limit, ranks = config.zero.spill.max_bytes, spec.num_ranks_per_worker
    if limit is not None and limit * ranks > nvme.size.num_bytes:
        yield invalid(
            f"{_ZERO}.spill.max_bytes",
            f"{limit} bytes for each of {ranks} ranks do not fit spec.nvme.size {nvme.size}; lower it, or "
            "remove it and each rank gets an equal part",
        )
