"""Mends of Lightning's DeepSpeed strategy: processors, the name "zerotrain", accumulation as under DDP, and
evaluation after a fit."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from zerotrain.compat.libraries.mends.accelerate import is_rank
from zerotrain.compat.libraries.mends.around import Function, around
from zerotrain.compat.libraries.mends.lending import (
    give_back,
    is_deferred,
    is_driven,
    is_lent,
    lend_for_evaluation,
    withdraw,
)
from zerotrain.runtime.checkpoint.packing import UnpackableError, pack
from zerotrain.runtime.comm.worlds import check_seen
from zerotrain.runtime.deepspeed.runtime.zero.partition_parameters import is_zero_param
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.state_access import local_interval

NAME = "zerotrain"

HYPERPARAMETERS = tuple(
    prefix + key for prefix in ("", "datamodule_") for key in ("hyper_parameters", "hparams_type")
)
"""Keys of a checkpoint with the arguments of a LightningModule or LightningDataModule."""

ENGINE = "_zerotrain_engine"
"""Attribute of a model: the engine of its last fit, which lives as long as the model."""

_loaded: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
"""Models that were lent for an evaluation, and got the weights of a checkpoint in it."""


def train_on_processors(module: ModuleType) -> None:
    """Make `DeepSpeedStrategy` run on processors: it refuses all but CUDA."""
    strategy: Any = module.DeepSpeedStrategy

    @around(strategy, "setup_environment")
    def setup_environment(setup: Function, self: Any) -> None:
        if isinstance(self.accelerator, module.CUDAAccelerator):
            setup(self)
        else:
            super(strategy, self).setup_environment()

    @around(module, "_validate_device_index_selection")
    def validate_indices(validate: Function, parallel_devices: Sequence[torch.device]) -> None:
        validate([device for device in parallel_devices if device.type != "cpu"])


def count_ranks_of_processors(module: ModuleType) -> None:
    """Make `devices="auto"` on processors mean the ranks that the launcher started, instead of one."""
    accelerator: Any = module.CPUAccelerator
    accelerator.auto_device_count = staticmethod(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def register_names(module: ModuleType) -> None:
    """Register the DeepSpeed strategies under our name, too: "zerotrain", "zerotrain_stage_3", ..."""
    registry: Any = (
        module.StrategyRegistry if hasattr(module, "StrategyRegistry") else module.STRATEGY_REGISTRY
    )
    for name, entry in list(registry.items()):
        if name.startswith("deepspeed"):
            registry.register(
                name.replace("deepspeed", NAME, 1),
                entry["strategy"],
                description=entry["description"].replace("DeepSpeed", NAME),
                **entry["init_params"],
            )


def follow_each_other(module: ModuleType) -> None:
    """Make fits and evaluations of one model follow each other in any order, also of several Trainers.

    Lightning calls `initialize` for each, after it removed all hooks of the model. Here an evaluation before
    a fit lends the model to an engine that only evaluates, one after a fit uses the engine of the fit, and
    another fit takes the model from that.
    """
    strategy: Any = module.DeepSpeedStrategy

    @around(strategy, "_initialize_deepspeed_train")
    def initialize_train(train: Function, self: Any, model: torch.nn.Module) -> None:
        withdraw(model)
        train(self, model)
        vars(model)[ENGINE] = self.model
        self.model.set_gradient_accumulation_boundary(True)  # see accumulate_as_ddp
        # After a resume ModelCheckpoint may save step N again, after the first micro-batch of step N + 1.
        self.model.saves_drop_gradients = True

    @around(strategy, "_initialize_deepspeed_inference")
    def initialize_inference(evaluate: Function, self: Any, model: torch.nn.Module) -> None:
        engine = vars(model).get(ENGINE)
        if engine is not None and not engine.core.is_closed:
            self.model = engine
        elif is_driven(model):  # by an engine of the script's own, which the model's calls use
            self.model = model
        elif is_deferred(model):
            evaluate(self, model)
        else:
            self.model = lend_for_evaluation(model, self.config)


def accumulate_as_ddp(module: ModuleType) -> None:
    """Make Lightning tell the engine which micro-batches end a step.

    The strategy lets the engine count them, across epochs, while Lightning counts within an epoch and steps
    at its end.
    """
    strategy: Any = module.DeepSpeedStrategy
    strategy.handles_gradient_accumulation = property(lambda self: False)
    strategy.block_backward_sync = _accumulate


@contextmanager
def _accumulate(strategy: Any) -> Iterator[None]:
    """Run micro-batches that end no step."""
    strategy.model.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        strategy.model.set_gradient_accumulation_boundary(True)


def leave_metric_schedules(module: ModuleType) -> None:
    """Make a schedule that follows a metric, which the engine refuses, stay with Lightning, which steps it.

    It is over the script's optimizer, whose groups are the engine's.
    """

    @around(module.DeepSpeedStrategy, "_init_optimizers")
    def init_optimizers(make: Function, self: Any) -> tuple[Any, Any]:
        optimizer, schedule = make(self)
        if schedule is None or not isinstance(schedule.scheduler, module.ReduceLROnPlateau):
            return optimizer, schedule
        self.lr_scheduler_configs = [schedule]
        return optimizer, None


def count_parameters(module: ModuleType) -> None:
    """Make the summary of a model under stage 3 count parameters that are whole, and a rank's part of the
    others: it takes DeepSpeed's attributes of both."""
    module.deepspeed_param_size = torch.Tensor.numel  # type: ignore[attr-defined]
    module.DeepSpeedLayerSummary.average_shard_parameters = property(_elements_here)


def _elements_here(layer: Any) -> int:
    """Return the number of elements of a layer's parameters that this rank has."""
    count = 0
    for parameter in layer._module.parameters():
        start, stop = local_interval(parameter) if is_zero_param(parameter) else (0, parameter.numel())
        count += stop - start
    return count


def divide_losses_once(module: ModuleType) -> None:
    """Make `backward` pass losses on as they are: Lightning has divided them by the accumulation steps."""

    @around(module.DeepSpeedPrecision, "backward")
    def backward(inner: Function, self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **{"scale_wrt_gas": False, **kwargs})


def leave_sharded_models(module: ModuleType) -> None:
    """Make a run leave the dtype of a model that an engine drives, as after a fit: values on other ranks
    cannot be converted."""

    @around(module.DeepSpeedPrecision, "convert_module")
    def convert_module(convert: Function, self: Any, model: torch.nn.Module) -> Any:
        return model if is_driven(model) else convert(self, model)


def step_manually(module: ModuleType) -> None:
    """Make a training step that calls `manual_backward` run beside the model's forward pass, not within it:
    the engine runs no backward pass inside of a forward pass."""

    @around(module.DeepSpeedStrategy, "training_step")
    def training_step(step: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module.automatic_optimization:
            return step(self, *args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)


def leave_models_in_place(module: ModuleType) -> None:
    """Make the end of a run leave a model that an engine drives where it is, instead of moving parameters,
    of which a rank has a part, to the host; one that was lent for an evaluation is given back."""

    @around(module.DeepSpeedStrategy, "teardown")
    def teardown(end: Function, self: Any) -> None:
        model = self.lightning_module
        if model is None or not (isinstance(self.model, Engine) or is_driven(model)):
            end(self)
            return
        if isinstance(self.model, Engine):
            self.model.synchronize()
        attributes = vars(model)
        attributes["cpu"] = lambda: model
        try:
            end(self)
        finally:
            del attributes["cpu"]
            if is_lent(model):
                give_back(model, keep_values=_loaded.pop(model, False))


def keep_loaded_weights(module: ModuleType) -> None:
    """Make a model that an evaluation read from a checkpoint (`ckpt_path`) keep these weights."""

    @around(module.DeepSpeedStrategy, "load_checkpoint")
    def load_checkpoint(load: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        if is_lent(self.lightning_module):
            _loaded[self.lightning_module] = True
        return found


def save_plain_hyperparameters(module: ModuleType) -> None:
    """Make checkpoints leave out hyperparameters that only a pickle could hold (paths, modules, classes).
    Nothing reads them at a resume."""

    @around(module.DeepSpeedStrategy, "save_checkpoint")
    def save_checkpoint(
        save: Function, self: Any, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        kept, left_out = dict(checkpoint), []
        for key in [key for key in HYPERPARAMETERS if key in kept]:
            value = kept.pop(key)
            if isinstance(value, Mapping):
                kept[key] = {name: each for name, each in value.items() if _is_plain(each)}
                left_out += [str(name) for name in value if name not in kept[key]]
        if left_out and self.is_global_zero:
            warnings.warn(
                f"checkpoints hold no pickle, so the hyperparameters {', '.join(left_out)} are left out",
                stacklevel=2,
            )
        save(self, kept, *args, **kwargs)


def _is_plain(value: object) -> bool:
    try:
        pack(value, "hyperparameter")
    except UnpackableError:
        return False
    return True


def settle_before_reading(module: ModuleType) -> None:
    """Make the collection of the model's state wait for an update in the background."""

    @around(module.DeepSpeedStrategy, "lightning_module_state_dict")
    def lightning_module_state_dict(read: Function, self: Any) -> Any:
        if isinstance(self.model, Engine):
            self.model.synchronize()
        return read(self)


def keep_number_of_ranks(module: ModuleType) -> None:
    """Make the end of a run leave the launcher's `WORLD_SIZE`, which the next run reads."""

    @around(module.LightningEnvironment, "teardown")
    def teardown(end: Function, self: Any) -> None:
        if not is_rank():
            end(self)


def check_number_of_ranks(module: ModuleType) -> None:
    """Make `Trainer.fit` compare its ranks with the launcher's."""

    @around(module.Trainer, "fit")
    def fit(run: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        check_seen("Lightning", self.world_size)
        return run(self, *args, **kwargs)
