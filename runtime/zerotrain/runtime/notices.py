"""Notices logged once at the start: effects of the ZeRO stage or of the configuration that nothing else would
report to the user."""

from __future__ import annotations

import logging
from functools import cache

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.encoding import BF16_MASTERS
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.kernels.device import on_device
from zerotrain.runtime.zero.sharded_model import ShardedModel


def gradient_access_notice(config: EngineConfig, core: ShardedModel) -> str | None:
    """Return how to read gradients where `p.grad` is empty after a backward pass; None where `p.grad` holds
    them."""
    if not any(part.unit.placement.grads_sharded for part in core.gradients.values()):
        return None
    return (
        f"zero_optimization.stage {config.zero.stage}: p.grad holds no values after backward; read a "
        "gradient with zerotrain.runtime.get_full_grad(parameter) on every rank, between backward and "
        "step or in a hook of engine.register_step_hook(hook, before_update=True)"
    )


def log_gradient_access(config: EngineConfig, core: ShardedModel, comm: Comm) -> None:
    """Log the text of `gradient_access_notice` once in the process, on rank 0."""
    text = gradient_access_notice(config, core)
    if text is not None and comm.rank == 0:
        log_once(text)


def log_notices(config: EngineConfig, source: object, comm: Comm) -> None:
    """Log once in the process, on rank 0, the settings that were accepted with another meaning. A caller that
    passes a resolved configuration as `source` shows these notices itself."""
    if comm.rank == 0 and not isinstance(source, EngineConfig):
        for notice in config.notices:
            log_once(f"{notice.path}: {notice.message}")


def update_notice(config: EngineConfig, device: torch.device) -> str | None:
    """Return that our CUDA kernels do not update masters in bf16; None where there are no such masters."""
    is_offloaded = config.zero.offload_optimizer is not None and config.zero.offload_optimizer.ratio == 1.0
    if device.type != "cuda" or is_offloaded or not config.precision.bf16_masters:
        return None
    return (
        f"{BF16_MASTERS}: updates on {device} are torch's operations on fp32 copies, which are slower than "
        "the CUDA kernel for fp32 masters"
    )


def log_kernels(config: EngineConfig, comm: Comm) -> None:
    """Load and check our CUDA kernels for the rank's device, and log once in the process which of them are
    not used there."""
    if comm.device.type != "cuda":
        return
    if (text := update_notice(config, comm.device)) is not None and comm.rank == 0:
        log_once(text)
    families: dict[str, list[str]] = {}
    for family, reason in on_device(comm.device).refused.items():
        families.setdefault(reason, []).append(family.value)
    for reason, names in families.items():
        log_once(
            f"CUDA kernels ({', '.join(names)}) are not used on {comm.device}, torch's operations are, which "
            f"are slower: {reason}"
        )


@cache
def log_once(text: str) -> None:
    """Log a warning once in the process."""
    logging.getLogger("zerotrain").warning(text)
