"""Rules that the API server cannot check: keys without behaviour in this version, and rules across values.

Called by reconcile before every attempt. A refusal becomes the condition Stalled with the field's path, and
nothing is created; a field is never silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.presets import PRESETS, auto_values
from zerotrain.contract.strict_json import own_json
from zerotrain.operator.constants import RESERVED_MOUNTS, Reason

from .outcomes import Outcomes
from .pod_rules import pod_template_refusals, taken_by
from .quantity import format_bytes
from .refusal import Refusal, invalid
from .spec import ZeroTrainingJobSpec
from .spill_rules import spill_refusals

__all__ = ["Refusal", "engine_config", "refusals"]


def refusals(spec: ZeroTrainingJobSpec) -> tuple[Refusal, ...]:
    """Return the reasons why this job must not start; empty when it may. Wrong values come before missing
    features."""
    found = [refusal for check in _CHECKS for refusal in check(spec)]
    return tuple(sorted(found, key=lambda refusal: refusal.reason != Reason.INVALID_SPEC))


def engine_config(spec: ZeroTrainingJobSpec, *, world_size: int | None = None) -> EngineConfig | None:
    """Return the inline configuration, resolved for the job's world size unless another is given; None with
    configFrom, which only the workers read. Raises ConfigError."""
    if spec.config is None:
        return None
    gpt = spec.model.gpt if spec.model is not None else None
    preset = spec.model.preset if spec.model is not None else None
    auto = auto_values(d_model=gpt.d_model if gpt else None, preset=preset, steps=spec.steps)
    # Use the text as key, since True, 1 and 1.0 are one key but not one value.
    text, ranks = json.dumps(spec.config, sort_keys=True), world_size or spec.world_size
    return _outcomes.of(
        text, (ranks, auto), lambda: resolve(load(own_json(text)), world_size=ranks, auto=auto)
    )


_outcomes = Outcomes()


def _configuration(spec: ZeroTrainingJobSpec) -> Iterator[Refusal]:
    try:
        config = engine_config(spec)
    except ConfigError as error:
        yield Refusal(path=_config_path(error.path), reason=Reason.INVALID_SPEC, message=_without_path(error))
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
        message = f"{name!r} is unknown; take one of {', '.join(PRESETS)}"
        yield Refusal(path="spec.model.preset", reason=Reason.INVALID_SPEC, message=message)


def _config_path(path: str) -> str:
    return f"spec.config.{path}" if path else "spec.config"


def _without_path(error: ConfigError) -> str:
    return str(error).removeprefix(f"{error.path}: ")


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
    clash = taken_by(spec.nvme.mount_path, RESERVED_MOUNTS) if spec.nvme is not None else None
    if spec.nvme is not None and clash is not None:
        yield invalid(
            "spec.nvme.mountPath",
            f"{spec.nvme.mount_path} collides with {clash}, which the operator mounts; choose another path",
        )


_CHECKS: tuple[Callable[[ZeroTrainingJobSpec], Iterator[Refusal]], ...] = (
    _configuration,
    _preset,
    _memory,
    _nvme_mount,
    pod_template_refusals,
)
