"""Notices logged once at the start: effects of the ZeRO stage or of the configuration that nothing else would
report to the user."""

from __future__ import annotations

import logging
from functools import cache

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.comm.group import Comm
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
        _log(text)


def log_notices(config: EngineConfig, source: object, comm: Comm) -> None:
    """Log once in the process, on rank 0, the settings that were accepted with another meaning. A caller that
    passes a resolved configuration as `source` shows these notices itself."""
    if comm.rank == 0 and not isinstance(source, EngineConfig):
        for notice in config.notices:
            _log(f"{notice.path}: {notice.message}")


@cache
def _log(text: str) -> None:
    logging.getLogger("zerotrain").warning(text)
