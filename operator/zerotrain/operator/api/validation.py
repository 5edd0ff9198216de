"""Rules that the API server cannot check: keys without behaviour in this version, and rules across values.

Called by reconcile before every attempt. A refusal becomes the condition Stalled with the field's path, and
nothing is created; a field is never silently ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.launch_command import LaunchCommandError, arguments_of_rank, begins_with_launch
from zerotrain.contract.planner import Limit
from zerotrain.contract.presets import PRESETS
from zerotrain.operator.constants import CHECKPOINT_MOUNT, CONFIG_DIR, RESERVED_MOUNTS, Reason

from .configuration import engine_config
from .core.containers import Container
from .core.volumes import VolumeMount
from .paths import PATH_RULE, is_plain
from .pod_template import PodTemplate
from .quantity import format_bytes
from .spec import ZeroTrainingJobSpec
from .storage import Encryption, Nvme


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One reason, about one field."""

    path: str
    """Path of the field from the object's root, such as spec.nvme.mountPath."""

    reason: Reason
    """Kind of the reason. INVALID_SPEC: wrong in every version; NOT_SUPPORTED: this version has no behaviour
    for it."""

    message: str
    """Text with the rule, the value and a remedy."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def invalid(path: str, message: str) -> Refusal:
    return Refusal(path=path, reason=Reason.INVALID_SPEC, message=message)


def refusals(spec: ZeroTrainingJobSpec) -> tuple[Refusal, ...]:
    """Return the reasons why this job must not start; empty when it may. Wrong values come before missing
    features."""
    found = [refusal for check in _CHECKS for refusal in check(spec)]
    return tuple(sorted(found, key=lambda refusal: refusal.reason != Reason.INVALID_SPEC))


def _configuration(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    try:
        config = engine_config(spec)
    except ConfigError as error:
        yield invalid(_config_path(error.path), str(error).removeprefix(f"{error.path}: "))
        return
    if config is None:
        return
    for item in config.unsupported:
        yield Refusal(
            path=_config_path(item.path), reason=Reason.NOT_SUPPORTED, message=f"{item.reason} {item.way_out}"
        )
    yield from spill_refusals(spec, config)


def _preset(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    name = spec.model.preset if spec.model is not None else None
    if name is not None and name not in PRESETS:
        yield invalid("spec.model.preset", f"{name!r} is unknown; take one of {', '.join(PRESETS)}")


def _config_path(path: str) -> str:
    return f"spec.config.{path}" if path else "spec.config"


def _command(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    command = (*spec.command, *spec.args)
    if begins_with_launch(command):
        try:
            arguments_of_rank(command)
        except LaunchCommandError as error:
            yield invalid("spec.command", str(error))


def _finetune(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    asked, checkpoint = spec.finetune, spec.checkpoint
    if asked is None or checkpoint is None:
        return
    if checkpoint.every_seconds is not None:
        yield invalid(
            "spec.checkpoint.everySeconds",
            f"{checkpoint.every_seconds}: a fine-tuning saves by steps; give everySteps instead",
        )
    every, saves = asked.eval.every_steps if asked.eval is not None else None, checkpoint.every_steps
    if every is not None and saves is not None and saves % every:
        yield invalid(
            "spec.checkpoint.everySteps",
            f"{saves} is not a multiple of spec.finetune.eval.everySteps {every}, so the best checkpoint "
            f"could not be kept; take {(saves // every + 1) * every}",
        )
    named = {"model": asked.model, "data": asked.data, "eval.data": asked.eval and asked.eval.data}
    for field, source in named.items():
        if source and not source.startswith("/") and not (spec.network and spec.network.egress_cidrs):
            yield invalid(
                f"spec.finetune.{field}",
                f"{source} is a name on the hub, and the job's network policy lets no pod out; give "
                "spec.network.egressCidrs, or an absolute path of a folder that podTemplate.volumes mounts",
            )


def _memory(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    resources = spec.resources
    if resources is None or resources.memory is None:
        return
    total = resources.memory.num_bytes
    pinned = resources.pinned_memory.num_bytes if resources.pinned_memory else 0
    shared = resources.shared_memory.num_bytes if resources.shared_memory else 0
    if pinned + shared >= total:
        yield invalid(
            "spec.resources.memory",
            f"{resources.memory} must exceed pinnedMemory {resources.pinned_memory or 0} + sharedMemory "
            f"{resources.shared_memory or 0} = {format_bytes(pinned + shared)}, which are counted in it; "
            "the rest is for the processes themselves",
        )


def _nvme_mount(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    if spec.nvme is not None:
        yield from _taken("spec.nvme.mountPath", spec.nvme.mount_path, RESERVED_MOUNTS)


def _scratch(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    limit = spec.scratch.ephemeral_storage if spec.scratch is not None else None
    nvme = spec.nvme
    if limit is None or nvme is None or nvme.storage_class_name is not None:
        return
    if limit.num_bytes < nvme.size.num_bytes:
        yield invalid(
            "spec.scratch.ephemeralStorage",
            f"{limit} is less than spec.nvme.size {nvme.size}, which is on the node's disk without a "
            "storageClassName; raise it, or remove it and the limit follows",
        )


_ZERO = "spec.config.zero_optimization"


def spill_refusals(spec: ZeroTrainingJobSpec, config: EngineConfig) -> Iterator[Refusal]:
    """Yield contradictions between the configuration and `spec.nvme`; none if nothing is offloaded to nvme.

    A spill to another place than the volume would fill the container's own disk, and the kubelet cannot see
    it there: its file has no name.
    """
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
        yield from _spill_folders(spec.nvme, config)
        yield from _spill_encryption(spec.nvme, config)
        yield from _spill_bytes(spec, spec.nvme, config)


def spill_limit(max_bytes: int, ranks: int) -> Limit:
    """Return the limit that `spill.max_bytes` of the configuration sets for a worker with `ranks` ranks."""
    return Limit(num_bytes=max_bytes * ranks, source=f"spill.max_bytes {format_bytes(max_bytes)} per rank")


def _spill_folders(nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
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


def _spill_encryption(nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
    asked = config.zero.spill.encryption
    if asked is not None and nvme.encryption is not None and Encryption(asked) is not nvme.encryption:
        yield invalid(
            f"{_ZERO}.spill.encryption",
            f"{asked} is not spec.nvme.encryption {nvme.encryption.value}; give it in one place only",
        )


def _spill_bytes(spec: ZeroTrainingJobSpec, nvme: Nvme, config: EngineConfig) -> Iterator[Refusal]:
    limit, ranks = config.zero.spill.max_bytes, spec.num_ranks_per_worker
    if limit is not None and limit * ranks > nvme.size.num_bytes:
        yield invalid(
            f"{_ZERO}.spill.max_bytes",
            f"{limit} bytes for each of {ranks} ranks do not fit spec.nvme.size {nvme.size}; lower it, or "
            "remove it and each rank gets an equal part",
        )


_OWN_FOLDERS = (CONFIG_DIR, CHECKPOINT_MOUNT)


def pod_template_refusals(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    """Yield contradictions between the lists of podTemplate, which the API server would find only when it
    rejects the pod."""
    template = spec.pod_template
    if template is None:
        return
    root = "spec.podTemplate"
    yield from _unknown_volumes(f"{root}.volumeMounts", template.volume_mounts, template)
    taken = (*RESERVED_MOUNTS, *([spec.nvme.mount_path] if spec.nvme is not None else []))
    for index, mount in enumerate(template.volume_mounts):
        yield from _taken(f"{root}.volumeMounts[{index}].mountPath", mount.mount_path, taken)
    yield from _on_the_spill(f"{root}.volumeMounts", template.volume_mounts, spec)
    for field, containers in (
        ("initContainers", template.init_containers),
        ("sidecars", template.sidecars),
    ):
        for index, container in enumerate(containers):
            mounts = f"{root}.{field}[{index}].volumeMounts"
            yield from _unknown_volumes(mounts, container.volume_mounts, template)
    yield from _repeated_names(root, (*template.init_containers, *template.sidecars))


def _unknown_volumes(path: str, mounts: tuple[VolumeMount, ...], template: PodTemplate) -> Iterator[Refusal]:
    known = {volume.name for volume in template.volumes}
    for index, mount in enumerate(mounts):
        if mount.name not in known:
            listed = ", ".join(sorted(known)) or "none"
            yield invalid(
                f"{path}[{index}].name",
                f"there is no volume {mount.name!r} in spec.podTemplate.volumes (it holds {listed}); add it",
            )


def _on_the_spill(path: str, mounts: tuple[VolumeMount, ...], spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    """Yield refusals of mounts below the NVMe volume: data spilled there would lie on another volume, under
    other rules."""
    if spec.nvme is None:
        return
    spill = PurePosixPath(spec.nvme.mount_path)
    for index, mount in enumerate(mounts):
        if spill in PurePosixPath(mount.mount_path).parents:
            yield invalid(
                f"{path}[{index}].mountPath",
                f"{mount.mount_path} is below spec.nvme.mountPath {spill}, where only the NVMe volume may "
                "lie; choose another path",
            )


def _taken(field: str, path: str, taken: Iterable[str]) -> Iterator[Refusal]:
    """Yield a refusal of a mount at `path` if it collides with one of the paths in `taken`."""
    clash = next((own for own in taken if _collide(path, own)), None)
    if clash is not None:
        yield invalid(field, f"{path} collides with {clash}, which the operator mounts; choose another path")


def _collide(path: str, own: str) -> bool:
    """Return whether the paths collide. The operator's own folders are also closed above and below; a folder
    below /tmp, say, is free."""
    mine, theirs = PurePosixPath(path), PurePosixPath(own)
    if mine == theirs:
        return True
    return own in _OWN_FOLDERS and (mine in theirs.parents or theirs in mine.parents)


def _repeated_names(root: str, containers: Iterable[Container]) -> Iterator[Refusal]:
    for name, times in Counter(container.name for container in containers).items():
        if times > 1:
            yield invalid(
                f"{root}.sidecars",
                f"the name {name!r} is taken by an init container, too; rename one of them",
            )


_CHECKS: tuple[Callable[[ZeroTrainingJobSpec], Iterator[Refusal]], ...] = (
    _configuration,
    _preset,
    _command,
    _finetune,
    _memory,
    _nvme_mount,
    _scratch,
    pod_template_refusals,
)
