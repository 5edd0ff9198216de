"""Engines for evaluation only: every parameter of the model was frozen when `initialize` took it over.

Reference models of DPO and GRPO, teachers and reward models are sharded, offloaded, loaded and exported like
a model in training, without gradients, optimizer or schedule (docs/adr/0053-evaluation.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import nn

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.facade.arguments import Arguments
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.sharded_model import ShardedModel

WAY_OUT = "set requires_grad on what should be trained before initialize (after close() of this engine)"


def check_trains(core: ShardedModel, what: str) -> None:
    """Raise RuntimeError where `what` needs trainable parameters and there are none."""
    if not core.gradients:
        raise RuntimeError(
            f"{what} is not possible: every parameter of the model was frozen when initialize took it "
            f"over, so this engine is for evaluation only and has no optimizer; {WAY_OUT}. Gradients of "
            "inputs through the frozen model are computed by loss.backward()"
        )


def trains_on_ranks(model: nn.Module, comm: Comm) -> bool:
    """Return whether the model has a parameter to train. Collective.

    Raises LayoutError, on every rank, where ranks differ.
    """
    trains = any(parameter.requires_grad for parameter in model.parameters())
    rows = comm.gather_record([float(trains)])
    frozen = [rank for rank, (trained,) in enumerate(rows) if not trained]
    if 0 < len(frozen) < len(rows):
        raise LayoutError(
            f"every parameter is frozen on ranks {frozen} and not on the others; set requires_grad of the "
            "same parameters on every rank"
        )
    return trains


def for_evaluation(config: EngineConfig, asked: Arguments) -> tuple[EngineConfig, Arguments]:
    """Return configuration and arguments for a frozen model: no optimizer, no schedule, no state for them.

    Raises ConfigError for an optimizer or a schedule among the arguments, which would update nothing.
    """
    for name in ("optimizer", "lr_scheduler"):
        if (given := getattr(asked, name)) is not None:
            raise ConfigError(
                name,
                "must not be passed for a model whose parameters are all frozen, as it would update nothing",
                given.__name__ if isinstance(given, type) else type(given).__name__,
                "Leave it out for an engine that evaluates, or set requires_grad on what should be trained.",
            )
    alone = replace(
        config,
        optimizer=None,
        scheduler=None,
        zero=replace(config.zero, offload_optimizer=None),
        precision=replace(config.precision, store_param_remainders=False),
    )
    return alone, replace(asked, model_parameters=None)


def optimizer_of(core: ShardedModel, optimizer: ZeroOptimizer) -> ZeroOptimizer:
    """Return the optimizer that `initialize` returns: None for an engine for evaluation only. The type omits
    None, because scripts that train would have to check for it everywhere."""
    return optimizer if core.gradients else cast(ZeroOptimizer, None)
