"""`shard`: the engine behind a model and an optimizer that a plain PyTorch loop drives.

It serves users with a loop of their own: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.arguments import ConfigSource
from zerotrain.runtime.initialization import initialize
from zerotrain.runtime.optim.groups import ModelParameters
from zerotrain.runtime.optim.torch_face import TorchOptimizer, share_step_hooks
from zerotrain.runtime.step import StepResult

Loss = TypeVar("Loss")


class ShardedOptimizer(TorchOptimizer):
    """Optimizer that `shard` returns with the model. All ranks call every method in the same order.

    Attributes:
        engine: for checkpoints, memory and metrics.
        param_groups: plain dicts as in torch; schedules may set `lr` and other values between steps.
    """

    def __init__(self, engine: Engine) -> None:
        driven = engine.optimizer
        super().__init__(driven.param_groups, driven.defaults)
        self.engine = engine
        self.param_groups, self.state = driven.param_groups, driven.state
        share_step_hooks(self, driven)
        driven.followers.append(self)
        driven.face = self
        # Every step() is a boundary, and which backward pass is the last one before it is not known.
        engine.config = replace(engine.config, managed_gradient_accumulation=False)

    @property
    def num_updates(self) -> int:  # type: ignore[override]
        """Number of steps that changed the weights; skipped ones do not count."""
        return self.engine.optimizer.num_updates

    def append_group(self, group: Mapping[str, Any]) -> None:
        """Add a parameter group; see `add_param_group`."""
        self.engine.optimizer.append_group(group)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the fp16 loss scale, to call `backward()` on; the loss itself without fp16.

        Under fp16, `backward()` of a loss that did not pass through this method raises RuntimeError.
        """
        return self.engine.scale(loss)

    @overload  # type: ignore[override]  # torch's gives no result
    def step(self, closure: None = None) -> StepResult: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Loss] | None = None) -> StepResult | Loss:
        """Reduce the gradients since the last `step` or `zero_grad`, clip them as configured, and update;
        return a `StepResult`.

        `closure` computes loss and gradients, and is called once. With a closure its value is returned, as in
        torch, and the result is `engine.last_step`.
        """
        if closure is None:
            return self.engine.step()
        with torch.enable_grad():
            loss = closure()
        self.engine.step()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps it otherwise; the engine calls the hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; `step()` also clears them."""
        self.engine.pipeline.drop_any()

    def scalars(self) -> dict[str, Any]:
        """Return the state without the tensors, as JSON-compatible values."""
        return self.engine.optimizer.scalars()

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore what `scalars` returned."""
        self.engine.optimizer.load_scalars(scalars)


def shard(
    model: nn.Module,
    config: ConfigSource,
    *,
    model_parameters: ModelParameters | None = None,
    lr_scheduler: Any = None,
    unit_modules: Sequence[str | type[nn.Module]] | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """Partition a model over the ranks for a loop of the user's own: `(model, optimizer)`. Collective.

    The model is the same object. Call it, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()` as
    in plain PyTorch; the caller divides losses by the number of micro-batches.
    `torch.nn.utils.clip_grad_norm_`, `model.zero_grad()` and torch's schedules over the optimizer work;
    `optimizer.step()` advances a schedule that is given as `lr_scheduler`. A frozen model has no optimizer:
    `(model, None)`. Arguments and errors are those of `initialize`.
    """
    engine, *_ = initialize(
        model=model,
        config=config,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        unit_modules=unit_modules,
    )
    if engine.is_evaluation_only:
        return model, cast(ShardedOptimizer, None)
    return model, ShardedOptimizer(engine)
