"""Mends of transformers' Trainer: evaluations and saves before training, and trainings in succession."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from zerotrain.compat.libraries.mends.accelerate_steps import TrainedEngines
from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.compat.libraries.mends.lending import common_uses, give_back, is_driven, lend_for_evaluation
from zerotrain.compat.libraries.mends.transformers import load_checkpoint
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.optim.schedule import LrSchedule

TOTAL_STEPS = "scheduler.params.total_num_steps"


def evaluate_before_training(module: ModuleType) -> None:
    """Make `evaluate` and `predict` before `train` lend the model to an engine that only evaluates it.

    transformers refuses stages below 3, removes the optimizer from the JSON, and makes an engine that trains,
    which `train` destroys together with the weights.
    """

    @around(module.Trainer, "evaluation_loop")
    def evaluation_loop(loop: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_deepspeed_enabled:
            return loop(self, *args, **kwargs)
        with _in_precision_of_engine(self.args), nullcontext() if self.deepspeed is not None else _lent(self):
            return loop(self, *args, **kwargs)


@contextmanager
def _in_precision_of_engine(args: Any) -> Iterator[None]:
    """Leave weights as they are where `bf16_full_eval` or `fp16_full_eval` would cast them for an evaluation:
    an engine has them, and some are on other ranks."""
    before = args.bf16_full_eval, args.fp16_full_eval
    args.bf16_full_eval = args.fp16_full_eval = False
    try:
        yield
    finally:
        args.bf16_full_eval, args.fp16_full_eval = before


@contextmanager
def _lent(trainer: Any) -> Iterator[None]:
    """Let an engine evaluate the Trainer's model for a block. Collective."""
    model, accelerator = trainer.model, trainer.accelerator
    is_ours = not is_driven(model)
    if is_ours:
        lend_for_evaluation(model, accelerator.state.deepspeed_plugin.deepspeed_config)
    # The model's own calls are the engine's, so nothing is prepared.
    trainer.deepspeed, models = model, accelerator._models
    accelerator._models = [model]
    try:
        yield
    finally:
        trainer.deepspeed, accelerator._models = None, models
        if is_ours:
            give_back(model)


def compute_with_weights(module: ModuleType) -> None:
    """Make a `compute_loss` that uses weights outside of the model work in an evaluation as in training:
    every rank calls it for each batch."""

    @around(module.Trainer, "prediction_step")
    def prediction_step(step: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        with common_uses(self.model):
            return step(self, *args, **kwargs)


def save_before_training(module: ModuleType) -> None:
    """Make `save_model` before `train` save the model as it is: transformers asks an engine for it."""

    @around(module.Trainer, "save_model")
    def save_model(save: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_deepspeed_enabled or self.deepspeed is not None:
            save(self, *args, **kwargs)
            return
        self.is_deepspeed_enabled = False
        try:
            save(self, *args, **kwargs)
        finally:
            self.is_deepspeed_enabled = True


def load_best_weights(module: ModuleType) -> None:
    """Make the load of the best model at the end take its weights alone, as under DDP: a training that
    follows goes on with the optimizer and the random numbers of the end."""

    @around(module.Trainer, "_load_best_model")
    def load_best_model(load: Function, self: Any) -> None:
        if not isinstance(self.model_wrapped, Engine):
            load(self)
            return
        load_checkpoint(
            self.model_wrapped,
            self.state.best_model_checkpoint,
            load_module_strict=not module._is_peft_model(self.model),
            load_module_only=True,
        )


def train_again(module: ModuleType) -> None:
    """Make a second `train` of a Trainer go on with the engine and its optimizer, and begin its schedule
    anew, as under DDP.

    `free_memory`, with which `train` begins, would destroy the engine and leave its parameters partitioned.
    """

    @around(module.Trainer, "_inner_training_loop")
    def inner_training_loop(run: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        if _engine_in_use(self) is not None:
            self.accelerator.deepspeed_engine_wrapped = None  # `free_memory` destroys what is here
        return run(self, *args, **kwargs)

    @around(module, "deepspeed_init")
    def deepspeed_init(init: Function, trainer: Any, num_training_steps: int, **kwargs: Any) -> Any:
        engine = _engine_in_use(trainer)
        if engine is None:
            return init(trainer, num_training_steps, **kwargs)
        return _go_on(trainer, engine, num_training_steps)


def _engine_in_use(trainer: Any) -> Engine | None:
    """Return the open engine of a Trainer's earlier training, if it has the present model.

    A Trainer that searches its batch size makes an engine for each.
    """
    engine = trainer.deepspeed
    if not isinstance(engine, Engine) or engine is not trainer.model_wrapped or engine.core.is_closed:
        return None
    return None if trainer.args.auto_find_batch_size else engine


def _go_on(trainer: Any, engine: Engine, num_training_steps: int) -> tuple[Any, Any]:
    """Return optimizer and schedule of the next training with the same engine."""
    accelerator = trainer.accelerator
    accelerator.deepspeed_engine_wrapped = TrainedEngines(engine)
    accelerator.deepspeed_engine_wrapped.add(engine, trainer.optimizer)
    accelerator._models.append(engine)
    accelerator._optimizers.append(trainer.optimizer)
    if engine.lr_scheduler is None:  # the Trainer steps its schedule, or that of its caller, itself
        return trainer.optimizer, trainer.lr_scheduler
    if isinstance(engine.schedule, LrSchedule):
        _check_total_steps(trainer, num_training_steps)
        engine.schedule.load_state_dict({"num_updates": 0})
        return trainer.optimizer, trainer.lr_scheduler
    # The engine stepped the schedule of the first training's arguments; the Trainer makes another.
    engine.lr_scheduler = None
    return trainer.optimizer, None


def _check_total_steps(trainer: Any, num_training_steps: int) -> None:
    """Raise ValueError where the JSON's schedule was made for another number of steps."""
    total = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.get_value(TOTAL_STEPS)
    if total not in (None, "auto", num_training_steps):
        raise ValueError(
            f"{TOTAL_STEPS} is {total}, the length of the first training, and must be that of this one, "
            f"which is {num_training_steps}: make trainings of one Trainer equally long, or leave the "
            "scheduler out of the JSON, so that the arguments give each its own"
        )
