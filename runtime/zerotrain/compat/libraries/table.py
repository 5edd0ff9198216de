"""The private symbols of other libraries that zerotrain relies on or mends."""

from __future__ import annotations

from zerotrain.compat.libraries.surface import Surface
from zerotrain.compat.libraries.table_of_jobs import IN_A_JOB
from zerotrain.compat.libraries.table_of_lightning import OF_LIGHTNING

SURFACES: tuple[Surface, ...] = (
    Surface(
        module="accelerate.state",
        symbol="PartialState._prepare_backend",
        why="ranks without a GPU would each be a world of its own",
        mend="accelerate.join_ranks_on_processors",
    ),
    Surface(
        module="accelerate.state",
        symbol="PartialState.__init__",
        why="a rank that sees another number of ranks must not train",
        mend="accelerate.check_number_of_ranks",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.get_state_dict",
        why="save_pretrained on ranks other than the first would read partitioned parameters",
        mend="accelerate.give_shapes_on_other_ranks",
    ),
    Surface(
        module="accelerate.utils.deepspeed",
        symbol="map_pytorch_optim_to_deepspeed",
        why="with offload an optimizer such as SGD would be replaced by Adam",
        mend="accelerate.keep_offloaded_optimizers",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="deepspeed_load_checkpoint",
        why="a resume would look for global_step* only",
        mend="transformers.load_own_checkpoints",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="deepspeed_init",
        why="an optimizer that a script gives its Trainer would be replaced by another",
        mend="transformers.keep_own_optimizers",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer.evaluation_loop",
        why="an evaluation before training would use up the model, or be refused below stage 3",
        mend="trainer.evaluate_before_training",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._inner_training_loop",
        why="a second training of a Trainer would find its engine destroyed",
        mend="trainer.train_again",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer.prediction_step",
        why="a loss that is computed from weights could not be evaluated at stage 3",
        mend="trainer.compute_with_weights",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer.save_model",
        why="a model could not be saved before it is trained",
        mend="trainer.save_before_training",
    ),
    Surface(
        module="transformers.trainer",
        symbol="Trainer._load_best_model",
        why="the best model's optimizer would come with its weights, unlike under DDP",
        mend="trainer.load_best_weights",
    ),
    Surface(
        module="transformers.trainer",
        symbol="deepspeed_init",
        why="a second training of a Trainer would make another optimizer",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator._prepare_deepspeed",
        why="an optimizer that is prepared could not be prepared again where the JSON names one",
        mend="accelerate.keep_prepared_optimizers",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.backward",
        why="a step would be taken in `backward` of the first model, whatever the script does",
        mend="accelerate_steps.step_by_optimizers",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="DeepSpeedOptimizerWrapper",
        why="`optimizer.step()` would do nothing",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.clip_grad_norm_",
        why="the norm would be that of the step before",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.free_memory",
        why="the second of two models would stay in memory",
    ),
    Surface(
        module="accelerate.accelerator",
        symbol="Accelerator.prepare",
        why="several models in one call would be refused",
        mend="accelerate_models.prepare_several_models",
    ),
    Surface(
        module="transformers.modeling_utils",
        symbol="PreTrainedModel._load_pretrained_model",
        why="under stage 3 rank 0 would load weights into tensors without memory",
        mend="transformers.read_weights_by_ranges",
    ),
    Surface(
        module="transformers.modeling_utils",
        symbol="PreTrainedModel._from_config",
        why="under stage 3 rank 0 would initialise tensors without memory",
    ),
    Surface(
        module="transformers.modeling_utils",
        symbol="PreTrainedModel.save_pretrained",
        why="a script that saves its model itself would read partitioned parameters",
        mend="saving.gather_models",
    ),
    Surface(
        module="peft.peft_model",
        symbol="PeftModel.save_pretrained",
        why="a script that saves its adapter itself would read partitioned parameters",
        mend="saving.gather_adapters",
    ),
    Surface(
        module="transformers.integrations.deepspeed",
        symbol="is_deepspeed_zero3_enabled",
        why="models are built as without stage 3",
    ),
    Surface(
        module="trl.models.utils",
        symbol="remove_hooks",
        why="generation at stage 3 would take hooks off DeepSpeed's optimizer",
        mend="trl.keep_hooks",
    ),
    Surface(
        module="trl.models.utils",
        symbol="add_hooks",
        why="generation at stage 3 would put hooks on DeepSpeed's optimizer",
    ),
    Surface(
        module="trl.models.utils",
        symbol="prepare_deepspeed",
        why="an engine would be taken for a function that returns rewards",
        mend="trl.give_models_for_evaluation",
    ),
    Surface(
        module="trl.trainer.utils",
        symbol="hash_module",
        why="each rank would read the whole model into its memory",
        mend="trl.hash_one_by_one",
    ),
    Surface(
        module="trl.trainer.dpo_trainer",
        symbol="DPOTrainer._precompute_ref_logps",
        why="the model would belong to an engine for evaluation when training begins",
        mend="trl.give_back_policy",
    ),
    Surface(
        module="trl.trainer.kto_trainer",
        symbol="KTOTrainer._precompute_ref_logps",
        why="the model would belong to an engine for evaluation when training begins",
        mend="trl.give_back_policy",
    ),
    Surface(
        module="trl.trainer.utils",
        symbol="maybe_gather_lm_head_ctx",
        why="losses in chunks would read ds_status of a parameter that is whole",
        mend="trl.gather_heads",
    ),
    Surface(
        module="peft.tuners.trainable_tokens.layer",
        symbol="TrainableTokensLayer._collect_token_weights",
        why="trainable tokens of a model under stage 3 would be sent between GPUs, where there may be none",
        mend="peft.read_rows_on_every_rank",
    ),
    Surface(
        module="peft.tuners.lora.layer",
        symbol="ParamWrapper._activate_lora",
        why="adapters of parameters (`target_parameters`) would be refused as writes under stage 3",
        mend="peft.add_to_parameters_without_writes",
    ),
    *OF_LIGHTNING,
    *IN_A_JOB,
)
