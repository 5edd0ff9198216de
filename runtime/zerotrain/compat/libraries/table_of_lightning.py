"""The rows of the table for Lightning's Trainer and Fabric, under both names of the package."""

from __future__ import annotations

from dataclasses import replace

from zerotrain.compat.libraries.surface import Surface

_NAMES = {
    "lightning": {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch-lightning": {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}
"""Installed distribution -> module of its Trainer and of its Fabric. Both hold the same code, twice."""

_TRAINER: tuple[Surface, ...] = (
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.setup_environment",
        why="the strategy would refuse processors",
        mend="lightning.train_on_processors",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy._initialize_deepspeed_inference",
        why="an evaluation or a fit after another would remove the engine's hooks",
        mend="lightning.follow_each_other",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.handles_gradient_accumulation",
        why="Lightning and the engine would count micro-batches differently",
        mend="lightning.accumulate_as_ddp",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy._init_optimizers",
        why="ReduceLROnPlateau would be refused",
        mend="lightning.leave_metric_schedules",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="ReduceLROnPlateau",
        why="schedules that follow a metric are told by it",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.teardown",
        why="the end of a run would move partitioned parameters to the host",
        mend="lightning.leave_models_in_place",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.load_checkpoint",
        why="weights that an evaluation read from a checkpoint would be gone after it",
        mend="lightning.keep_loaded_weights",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.save_checkpoint",
        why="hyperparameters that only a pickle could hold would end the first save",
        mend="lightning.save_plain_hyperparameters",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.lightning_module_state_dict",
        why="a checkpoint would read weights during an update in the background",
        mend="lightning.settle_before_reading",
    ),
    Surface(
        module="pytorch.utilities.model_summary.model_summary_deepspeed",
        symbol="DeepSpeedLayerSummary.average_shard_parameters",
        why="the summary before a fit would read attributes that the engine's parameters do not have",
        mend="lightning.count_parameters",
    ),
    Surface(
        module="pytorch.utilities.model_summary.model_summary_deepspeed",
        symbol="deepspeed_param_size",
        why="the summary before a fit would refuse parameters that are whole",
    ),
    Surface(
        module="pytorch.plugins.precision.deepspeed",
        symbol="DeepSpeedPrecision.backward",
        why="losses would be divided twice by the accumulation steps",
        mend="lightning.divide_losses_once",
    ),
    Surface(
        module="pytorch.plugins.precision.deepspeed",
        symbol="DeepSpeedPrecision.clip_gradients",
        why="`clip_gradients` of a LightningModule would do nothing",
        mend="lightning_steps.clip_as_asked",
    ),
    Surface(
        module="pytorch.callbacks.gradient_accumulation_scheduler",
        symbol="GradientAccumulationScheduler.on_train_start",
        why="accumulation that changes between epochs would be refused",
        mend="lightning_steps.change_accumulation",
    ),
    Surface(
        module="pytorch.plugins.precision.deepspeed",
        symbol="DeepSpeedPrecision.convert_module",
        why="a test after a fit would convert parameters that are on other ranks",
        mend="lightning.leave_sharded_models",
    ),
    Surface(
        module="pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.training_step",
        why="a manual backward pass would run within the model's forward pass",
        mend="lightning.step_manually",
    ),
    Surface(
        module="pytorch.strategies",
        symbol="StrategyRegistry",
        why='Trainer(strategy="zerotrain") would not exist',
        mend="lightning.register_names",
    ),
    Surface(
        module="pytorch.accelerators.cpu",
        symbol="CPUAccelerator.auto_device_count",
        why="ranks on processors would each be a world of its own",
        mend="lightning.count_ranks_of_processors",
    ),
    Surface(
        module="pytorch.trainer.trainer",
        symbol="Trainer.fit",
        why="a rank that sees another number of ranks must not train",
        mend="lightning.check_number_of_ranks",
    ),
)

_FABRIC: tuple[Surface, ...] = (
    Surface(
        module="fabric.strategies.deepspeed",
        symbol="DeepSpeedStrategy.setup_environment",
        why="the strategy would refuse processors",
        mend="lightning.train_on_processors",
    ),
    Surface(
        module="fabric.strategies.deepspeed",
        symbol="DeepSpeedStrategy.module_to_device",
        why="a model that was built without memory could not be set up",
        mend="fabric.leave_unread_models",
    ),
    Surface(
        module="fabric.strategies.deepspeed",
        symbol="DeepSpeedStrategy.optimizer_step",
        why="a step would be one of the optimizer, which updates nothing",
        mend="fabric.step_the_engine",
    ),
    Surface(
        module="fabric.strategies.deepspeed",
        symbol="_get_deepspeed_engines_from_state",
        why="save and load would not find the engine, which is no module",
        mend="fabric.find_engines",
    ),
    Surface(
        module="fabric.strategies",
        symbol="STRATEGY_REGISTRY",
        why='Fabric(strategy="zerotrain") would not exist',
        mend="lightning.register_names",
    ),
    Surface(
        module="fabric.accelerators.cpu",
        symbol="CPUAccelerator.auto_device_count",
        why="ranks on processors would each be a world of its own",
        mend="lightning.count_ranks_of_processors",
    ),
    Surface(
        module="fabric.plugins.environments.lightning",
        symbol="LightningEnvironment.teardown",
        why="the end of a run would remove the launcher's WORLD_SIZE, and another be refused",
        mend="lightning.keep_number_of_ranks",
    ),
    Surface(
        module="fabric.fabric",
        symbol="Fabric._validate_setup",
        why="a rank that sees another number of ranks must not train",
        mend="fabric.check_number_of_ranks",
    ),
)


def _under_each_name(row: Surface) -> list[Surface]:
    """Return a row of `pytorch` or `fabric` once for each package."""
    part, _, rest = row.module.partition(".")
    return [
        replace(row, module=f"{modules[part]}.{rest}", distribution=distribution)
        for distribution, modules in _NAMES.items()
    ]


OF_LIGHTNING: tuple[Surface, ...] = tuple(
    found for row in (*_TRAINER, *_FABRIC) for found in _under_each_name(row)
)
