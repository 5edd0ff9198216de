"""Mends of Lightning: what its DeepSpeed strategy leaves out of a step, or refuses, for DeepSpeed's sake."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.compat.libraries.mends.lightning import ENGINE
from zerotrain.runtime.zero.placeholder import owner_of
from zerotrain.runtime.zero.sharded_model import ShardedModel


def clip_as_asked(module: ModuleType) -> None:
    """Make `clip_gradients` of a LightningModule clip where the configuration names no norm: in a training
    step that optimizes by hand, or in `configure_gradient_clipping`. Otherwise the engine clips."""
    precision: Any = module.DeepSpeedPrecision

    @around(precision, "clip_gradients")
    def clip_gradients(leave: Function, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        owner = owner_of(next(iter(self.main_params(optimizer))))
        engine = vars(owner.model).get(ENGINE) if isinstance(owner, ShardedModel) else None
        if engine is None or engine.config.gradient_clipping:
            leave(self, optimizer, *args, **kwargs)
        else:
            super(precision, self).clip_gradients(optimizer, *args, **kwargs)


def change_accumulation(module: ModuleType) -> None:
    """Make `GradientAccumulationScheduler` accept the strategy: Lightning tells the engine which micro-batch
    ends a step, so that their number may change."""

    @around(module.GradientAccumulationScheduler, "on_train_start")
    def on_train_start(check: Function, self: Any, trainer: Any, pl_module: Any) -> None:
        asked = SimpleNamespace(strategy=None, accumulate_grad_batches=trainer.accumulate_grad_batches)
        check(self, asked, pl_module)
