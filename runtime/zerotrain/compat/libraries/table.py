"""The private symbols of other libraries that zerotrain relies on or mends."""

from __future__ import annotations

from zerotrain.compat.libraries.surface import ACCELERATE, LIGHTNING, TRANSFORMERS, TRL, Surface
from zerotrain.compat.libraries.table_of_jobs import IN_A_JOB

SURFACES: tuple[Surface, ...] = (
    Surface(
        module="accelerate.state",
        symbol="PartialState._prepare_backend",
        versions=ACCELERATE,
        why="ranks without a GPU would each be a world of its own",
        mend="accelerate.join_ranks_on_processors",
    ),
    Surface(
        module="accelerate.state",
        symbol="PartialState.__init__",
        versions=ACCELERATE,
        why="a rank that sees another number of ranks must not train",
        mend="accelerate.check_number_of_ranks",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.get_state_dict",
        versions=ACCELERATE,
        why="save_pretrained on ranks other than the first would read partitioned parameters",
        mend="accelerate.give_shapes_on_other_ranks",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="deepspeed_load_checkpoint",
        versions=TRANSFORMERS,
        why="a resume would look for global_step* only",
        mend="transformers.load_own_checkpoints",
    ),
    Surface(
        module="transformers.modeling_utils",
        symbol="PreTrainedModel._load_pretrained_model",
        versions=TRANSFORMERS,
        why="under stage 3 rank 0 would load weights into tensors without memory",
        mend="transformers.read_weights_by_ranges",
    ),
    Surface(
        module="transformers.modeling_utils",
        symbol="PreTrainedModel._from_config",
        versions=TRANSFORMERS,
        why="under stage 3 rank 0 would initialise tensors without memory",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="is_deepspeed_zero3_enabled",
        versions=TRANSFORMERS,
        why="models are built as without stage 3",
    ),
    Surface(
        module="trl.models.utils",
        symbol="remove_hooks",
        versions=TRL,
        why="generation at stage 3 would take hooks off DeepSpeed's optimizer",
        mend="trl.keep_hooks",
    ),
    Surface(
        module="trl.models.utils",
        symbol="add_hooks",
        versions=TRL,
        why="generation at stage 3 would put hooks on DeepSpeed's optimizer",
    ),
    Surface(
        module="trl.models.utils",
        symbol="prepare_deepspeed",
        versions=TRL,
        why="an engine would be taken for a function that returns rewards",
        mend="trl.give_models_for_evaluation",
    ),
    Surface(
        module="trl.trainer.utils",
        symbol="maybe_gather_lm_head_ctx",
        versions=TRL,
        why="losses in chunks would read ds_status of a parameter that is whole",
        mend="trl.gather_heads",
    ),
    Surface(
        module="lightning.pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.setup_environment",
        versions=LIGHTNING,
        why="the strategy would refuse processors",
        mend="lightning.train_on_processors",
    ),
    Surface(
        module="lightning.pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy._initialize_deepspeed_inference",
        versions=LIGHTNING,
        why="an evaluation after a fit would remove the engine's hooks",
        mend="lightning.evaluate_after_fit",
    ),
    Surface(
        module="lightning.pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.handles_gradient_accumulation",
        versions=LIGHTNING,
        why="Lightning and the engine would count micro-batches differently",
        mend="lightning.accumulate_as_ddp",
    ),
    Surface(
        module="lightning.pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.teardown",
        versions=LIGHTNING,
        why="the end of a run would move partitioned parameters to the host",
        mend="lightning.leave_models_in_place",
    ),
    Surface(
        module="lightning.pytorch.strategies.deepspeed",
        symbol="DeepSpeedStrategy.lightning_module_state_dict",
        versions=LIGHTNING,
        why="a checkpoint would read weights during an update in the background",
        mend="lightning.settle_before_reading",
    ),
    Surface(
        module="lightning.pytorch.plugins.precision.deepspeed",
        symbol="DeepSpeedPrecision.backward",
        versions=LIGHTNING,
        why="losses would be divided twice by the accumulation steps",
        mend="lightning.divide_losses_once",
    ),
    Surface(
        module="lightning.pytorch.strategies",
        symbol="StrategyRegistry",
        versions=LIGHTNING,
        why='Trainer(strategy="zerotrain") would not exist',
        mend="lightning.register_names",
    ),
    Surface(
        module="lightning.pytorch.accelerators.cpu",
        symbol="CPUAccelerator.auto_device_count",
        versions=LIGHTNING,
        why="ranks on processors would each be a world of its own",
        mend="lightning.count_ranks_of_processors",
    ),
    Surface(
        module="lightning.pytorch.trainer.trainer",
        symbol="Trainer.fit",
        versions=LIGHTNING,
        why="a rank that sees another number of ranks must not train",
        mend="lightning.check_number_of_ranks",
    ),
    *IN_A_JOB,
)
