"""`shard`: the engine behind a model and an optimizer that a plain PyTorch loop drives.

For people who own their loop: `loss.backward(); optimizer.step(); optimizer.zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.engine import Engine, initialize
from zerotrain.runtime.facade.arguments import ConfigSource
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.trees import replace_tensors


class ShardedOptimizer:
    """What `shard` returns beside the model. All ranks call every method in the same order.

    Attributes:
        engine: for checkpoints, memory and metrics.
        param_groups: plain dicts as in torch; schedules may set `lr` and the rest between steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.param_groups = engine.optimizer.param_groups
        engine.set_gradient_accumulation_boundary(True)  # every step() is one
        engine.core.at_boundary = lambda: False  # but nobody knows which backward is the last before it

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the fp16 loss scale, to call `backward()` on; the loss itself otherwise.

        Where fp16 computes, `backward()` of a loss that did not go through here raises RuntimeError.
        """
        return self.engine.scale(loss)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:
        """Reduce, clip (as configured) and update by the gradients since the last `step` or `zero_grad`.

        `closure` computes loss and gradients, once.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step; `step()` does it, too."""
        if self.engine.core.has_gradients:  # else an update in the background would be waited for
            self.engine.pipeline.drop()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able scalars; the tensors are sharded and go to `engine.save_checkpoint`."""
        return self.engine.optimizer.scalars()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        self.engine.optimizer.load_scalars(state)


def shard(
    model: nn.Module,
    config: ConfigSource,
    *,
    model_parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None = None,
    unit_modules: Sequence[str | type[nn.Module]] | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """Partition a model over the ranks for a loop of your own: `(model, optimizer)`. Collective.

    The model is the same object. Call it, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()` as
    in plain PyTorch; divide losses by the number of micro-batches yourself. Arguments and errors as of
    `initialize`.
    """
    engine, *_ = initialize(
        model=model, config=config, model_parameters=model_parameters, unit_modules=unit_modules
    )
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    if dtype is not torch.float32 and engine.config.precision.cast_inputs:

        def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            """As the engine's own call does."""
            wanted: tuple[Any, Any] = replace_tensors(
                (args, kwargs),
                lambda tensor: tensor.dtype is torch.float32,
                lambda tensors: [tensor.to(dtype) for tensor in tensors],
            )
            return wanted

        model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
    return model, ShardedOptimizer(engine)
