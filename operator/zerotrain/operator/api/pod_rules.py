"""Rules of podTemplate across its lists. Without them, the API server would find violations only when it
rejects the pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from zerotrain.operator.constants import CHECKPOINT_MOUNT, CONFIG_DIR, RESERVED_MOUNTS

from .core.containers import Container
from .core.volumes import VolumeMount
from .pod_template import PodTemplate
from .refusal import Refusal, invalid
from .spec import ZeroTrainingJobSpec

_OWN_FOLDERS = (CONFIG_DIR, CHECKPOINT_MOUNT)


def pod_template_refusals(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    template = spec.pod_template
    if template is None:
        return
    root = "spec.podTemplate"
    yield from _unknown_volumes(f"{root}.volumeMounts", template.volume_mounts, template)
    yield from _taken_paths(f"{root}.volumeMounts", template.volume_mounts, _taken(spec))
    yield from _on_the_spill(f"{root}.volumeMounts", template.volume_mounts, spec)
    for field, containers in (
        ("initContainers", template.init_containers),
        ("sidecars", template.sidecars),
    ):
        for index, container in enumerate(containers):
            mounts = f"{root}.{field}[{index}].volumeMounts"
            yield from _unknown_volumes(mounts, container.volume_mounts, template)
    yield from _repeated_names(root, (*template.init_containers, *template.sidecars))


def _taken(spec: ZeroTrainingJobSpec) -> tuple[str, ...]:
    return (*RESERVED_MOUNTS, *([spec.nvme.mount_path] if spec.nvme is not None else []))


def _unknown_volumes(path: str, mounts: tuple[VolumeMount, ...], template: PodTemplate) -> Iterator[Refusal]:
    known = {volume.name for volume in template.volumes}
    for index, mount in enumerate(mounts):
        if mount.name not in known:
            listed = ", ".join(sorted(known)) or "none"
            yield invalid(
                f"{path}[{index}].name",
                f"there is no volume {mount.name!r} in spec.podTemplate.volumes (it holds {listed}); add it",
            )


def _taken_paths(path: str, mounts: tuple[VolumeMount, ...], taken: tuple[str, ...]) -> Iterator[Refusal]:
    for index, mount in enumerate(mounts):
        clash = taken_by(mount.mount_path, taken)
        if clash is not None:
            yield invalid(
                f"{path}[{index}].mountPath",
                f"{mount.mount_path} collides with {clash}, which the operator mounts; choose another path",
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


def taken_by(path: str, taken: Iterable[str]) -> str | None:
    """Return the first of the paths in `taken` that a mount at `path` would collide with."""
    return next((own for own in taken if _collide(path, own)), None)


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
