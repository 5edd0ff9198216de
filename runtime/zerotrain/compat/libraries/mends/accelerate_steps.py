"""Mend of Accelerate: a step of an engine is taken where the script calls `optimizer.step()`, as under DDP.

Accelerate takes it within `accelerator.backward()`, of the first engine that it prepared, and makes
`optimizer.step()` and `optimizer.zero_grad()` do nothing. So a second model would not be trained, a second
backward pass before the step would be another step, and a step or a gradient that the script leaves out would
be taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.notices import log_once
from zerotrain.runtime.zero.placeholder import owner_of

PASSES_WITHOUT_A_STEP = 32
"""Backward passes after which a script that has never called `optimizer.step()` is told."""


class SteppingOptimizer(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """Optimizer of one engine, which steps and drops gradients where the script calls it."""

    engine: Engine | None = None
    is_due = False
    """Whether the engine has gradients of the last micro-batch of a step."""

    def step(self) -> None:
        """Step the engine if it has gradients for it, as an optimizer whose gradients are None does not."""
        if self.is_due and self.gradient_state.sync_gradients and self.engine is not None:
            self.is_due = False
            self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients that were not used for a step."""
        if self.gradient_state.sync_gradients and self.engine is not None and self.engine.core.has_gradients:
            self.is_due = False
            self.engine.zero_grad()


class TrainedEngines(DeepSpeedEngineWrapper):  # type: ignore[misc]
    """The engines that one Accelerator trains, each with the optimizer that the script steps it by."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._optimizers: dict[Engine, SteppingOptimizer | None] = {}
        self._passes = 0

    def add(self, engine: Engine, optimizer: SteppingOptimizer | None) -> None:
        """Train one more engine; without an optimizer in the script its steps are part of the passes."""
        self._optimizers[engine] = optimizer
        if optimizer is not None:
            optimizer.engine = engine
        if len(self._optimizers) == 1:
            self.engine = engine
            return
        for each in self._optimizers if len(self._optimizers) == 2 else (engine,):
            each.module.register_forward_pre_hook(lambda *_, each=each: self._note_pass(each))

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Accumulate the gradients of a loss in all engines that are a part of it."""
        for each in self._optimizers:
            each.set_gradient_accumulation_boundary(sync_gradients)
        self.engine.backward(loss, **kwargs)
        if not sync_gradients:
            return
        for each, optimizer in self._optimizers.items():
            if optimizer is not None:
                optimizer.is_due = optimizer.is_due or each is self.engine or each.core.has_gradients
            elif each is self.engine:
                each.step()
        self._tell_of_missing_steps()

    def norm_of(self, parameters: Iterable[Any]) -> float | None:
        """Step the engine that has the parameters, if it is due; return the norm of its last step."""
        owner = next((owner_of(parameter) for parameter in parameters), None)
        engine = next((each for each in self._optimizers if each.core is owner), self.engine)
        if (optimizer := self._optimizers[engine]) is not None:
            optimizer.step()
        return engine.get_global_grad_norm()

    def destroy(self) -> None:
        """Close all engines."""
        for each in self._optimizers:
            each.destroy()

    def _note_pass(self, engine: Engine) -> None:
        """Let the next loss be one of this engine, the last whose model was called with gradients."""
        if torch.is_grad_enabled():
            self.engine = engine

    def _tell_of_missing_steps(self) -> None:
        """Say once if the script does not step by its optimizers, as with DeepSpeed it need not."""
        self._passes += 1
        stepped = any(each.global_steps for each in self._optimizers)
        if self._passes == PASSES_WITHOUT_A_STEP and not stepped and self.engine.rank == 0:
            log_once(
                f"accelerator.backward() was called {self._passes} times and the optimizer's step() never: "
                "nothing is trained yet; call step() of the optimizer that prepare() returned"
            )


def step_by_optimizers(module: ModuleType) -> None:
    """Make `prepare` add each model that is trained to the Accelerator's engines, and `clip_grad_norm_` ask
    the one that has the parameters."""
    module.DeepSpeedOptimizerWrapper = SteppingOptimizer  # type: ignore[attr-defined]

    @around(module.Accelerator, "_prepare_deepspeed")
    def prepare_deepspeed(prepare: Function, self: Any, *args: Any) -> Any:
        held, self.deepspeed_engine_wrapped = self.deepspeed_engine_wrapped, None
        try:
            result = prepare(self, *args)
            engines = [each for each in result if isinstance(each, Engine) and not each.is_evaluation_only]
            optimizers = [each for each in result if isinstance(each, SteppingOptimizer)]
            for engine in engines:
                held = held or TrainedEngines(engine)
                held.add(engine, optimizers[0] if optimizers else None)
            return result
        finally:
            self.deepspeed_engine_wrapped = held

    @around(module.Accelerator, "clip_grad_norm_")
    def clip_grad_norm(clip: Function, self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        engines = getattr(self, "deepspeed_engine_wrapped", None)
        if not isinstance(engines, TrainedEngines):
            return clip(self, parameters, *args, **kwargs)
        return engines.norm_of([parameters] if isinstance(parameters, torch.Tensor) else parameters)

    @around(module.Accelerator, "free_memory")
    def free_memory(free: Function, self: Any, *objects: Any) -> Any:
        engines = getattr(self, "deepspeed_engine_wrapped", None)
        if isinstance(engines, TrainedEngines):
            engines.destroy()
        return free(self, *objects)
