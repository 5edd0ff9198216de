"""The ZeRO engine. `import zerotrain.runtime as zt` gives the whole public API.

Names are imported on first use (PEP 562), so that the parts without torch (`zerotrain.runtime.launch`, the
channel) can be imported from this package without loading torch, and where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrain.runtime.activation.checkpoint import checkpoint_activations
    from zerotrain.runtime.activation.settings import (
        checkpointing_is_configured,
        configure_checkpointing,
        reset_checkpointing,
    )
    from zerotrain.runtime.comm.start import init_distributed
    from zerotrain.runtime.construct.context import init_context
    from zerotrain.runtime.construct.values import materialize
    from zerotrain.runtime.engine import Engine
    from zerotrain.runtime.facade.memory import MemoryStatus, memory_status, see_memory_usage
    from zerotrain.runtime.initialization import initialize
    from zerotrain.runtime.models.huggingface import load_pretrained
    from zerotrain.runtime.shard_api import ShardedOptimizer, shard
    from zerotrain.runtime.step import StepResult
    from zerotrain.runtime.train.progress_reporter import ProgressReporter
    from zerotrain.runtime.weights.load import load_weights
    from zerotrain.runtime.zero.access import full_parameters
    from zerotrain.runtime.zero.placeholder import ParameterSharded
    from zerotrain.runtime.zero.state_access import (
        get_full_fp32,
        get_full_grad,
        get_full_optimizer_state,
        get_local_fp32,
        get_local_grad,
        get_local_optimizer_state,
        local_interval,
        set_full_fp32,
        set_full_grad,
        set_full_optimizer_state,
        set_local_fp32,
        set_local_grad,
        set_local_optimizer_state,
    )
    from zerotrain.runtime.zero.writes import OutsideWrite

_HOME = {
    "Engine": "zerotrain.runtime.engine",
    "MemoryStatus": "zerotrain.runtime.facade.memory",
    "OutsideWrite": "zerotrain.runtime.zero.writes",
    "ParameterSharded": "zerotrain.runtime.zero.placeholder",
    "ProgressReporter": "zerotrain.runtime.train.progress_reporter",
    "ShardedOptimizer": "zerotrain.runtime.shard_api",
    "StepResult": "zerotrain.runtime.step",
    "checkpoint_activations": "zerotrain.runtime.activation.checkpoint",
    "checkpointing_is_configured": "zerotrain.runtime.activation.settings",
    "configure_checkpointing": "zerotrain.runtime.activation.settings",
    "full_parameters": "zerotrain.runtime.zero.access",
    "get_full_fp32": "zerotrain.runtime.zero.state_access",
    "get_full_grad": "zerotrain.runtime.zero.state_access",
    "get_full_optimizer_state": "zerotrain.runtime.zero.state_access",
    "get_local_fp32": "zerotrain.runtime.zero.state_access",
    "get_local_grad": "zerotrain.runtime.zero.state_access",
    "get_local_optimizer_state": "zerotrain.runtime.zero.state_access",
    "init_context": "zerotrain.runtime.construct.context",
    "init_distributed": "zerotrain.runtime.comm.start",
    "initialize": "zerotrain.runtime.initialization",
    "load_pretrained": "zerotrain.runtime.models.huggingface",
    "load_weights": "zerotrain.runtime.weights.load",
    "local_interval": "zerotrain.runtime.zero.state_access",
    "materialize": "zerotrain.runtime.construct.values",
    "memory_status": "zerotrain.runtime.facade.memory",
    "reset_checkpointing": "zerotrain.runtime.activation.settings",
    "see_memory_usage": "zerotrain.runtime.facade.memory",
    "set_full_fp32": "zerotrain.runtime.zero.state_access",
    "set_full_grad": "zerotrain.runtime.zero.state_access",
    "set_full_optimizer_state": "zerotrain.runtime.zero.state_access",
    "set_local_fp32": "zerotrain.runtime.zero.state_access",
    "set_local_grad": "zerotrain.runtime.zero.state_access",
    "set_local_optimizer_state": "zerotrain.runtime.zero.state_access",
    "shard": "zerotrain.runtime.shard_api",
}

__all__ = [
    "Engine",
    "MemoryStatus",
    "OutsideWrite",
    "ParameterSharded",
    "ProgressReporter",
    "ShardedOptimizer",
    "StepResult",
    "checkpoint_activations",
    "checkpointing_is_configured",
    "configure_checkpointing",
    "full_parameters",
    "get_full_fp32",
    "get_full_grad",
    "get_full_optimizer_state",
    "get_local_fp32",
    "get_local_grad",
    "get_local_optimizer_state",
    "init_context",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "load_weights",
    "local_interval",
    "materialize",
    "memory_status",
    "reset_checkpointing",
    "see_memory_usage",
    "set_full_fp32",
    "set_full_grad",
    "set_full_optimizer_state",
    "set_local_fp32",
    "set_local_grad",
    "set_local_optimizer_state",
    "shard",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
