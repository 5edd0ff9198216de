"""Every key of DeepSpeed's configuration is known here under the name that users write."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.unit


ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint
sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory prefetch_bucket_size
stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold
model_persistence_threshold stage3_model_persistence_threshold max_live_parameters
stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance
gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save module_granularity_threshold stage3_module_granularity_threshold
use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential
stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients compute_grad_norm parameter_alignment
zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
enable_sanity_checks save_muon_momentum_buffer_in_memory zenflow leaf_module.classes leaf_module.names
leaf_module.name_suffixes offload_param.device offload_param.nvme_path offload_param.buffer_count
offload_param.buffer_size offload_param.max_in_cpu offload_param.pin_memory offload_optimizer.device
offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.pin_memory
offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init
offload_optimizer.ratio offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc
"""
TOP = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type
sparse_gradients steps_per_print wall_clock_breakdown memory_breakdown dataloader_drop_last
managed_gradient_accumulation zero_force_ds_cpu_optimizer zero_allow_untested_optimizer dump_state
bf16.enabled bf16.immediate_grad_update bf16.check_grad_overflow bf16.bf16_master_weights_and_grads
bf16.bf16_optimizer_states bfloat16.enabled fp16.enabled fp16.auto_cast fp16.loss_scale
fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis
fp16.min_loss_scale fp16.fp16_master_weights_and_grads data_types.grad_accum_dtype data_types.param_dtype
data_types.buffer_dtype torch_autocast.enabled torch_autocast.dtype
torch_autocast.lower_precision_safe_modules amp aio.block_size aio.queue_depth aio.intra_op_parallelism
aio.single_submit aio.overlap_events aio.use_gds activation_checkpointing.partition_activations
activation_checkpointing.number_checkpoints activation_checkpointing.contiguous_memory_optimization
activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
activation_checkpointing.cpu_checkpointing checkpoint.tag_validation checkpoint.load_universal
checkpoint.use_node_local_storage checkpoint.parallel_write.pipeline_stage checkpoint.writer.type
checkpoint.writer.decoupled checkpoint.writer.io_buffer_size checkpoint.writer.io_buffer_double
checkpoint.writer.data_parallel checkpoint.writer.io_multiplier datastates_ckpt elasticity.enabled
elasticity.max_train_batch_size elasticity.micro_batch_sizes elasticity.min_gpus elasticity.max_gpus
elasticity.version autotuning flops_profiler.enabled comms_logger.enabled tensorboard.enabled wandb.enabled
csv_monitor.enabled comet.enabled compile.deepcompile compile.offload_activation
compile.offload_opt_states compile.passes tensor_parallel.autotp_size tensor_parallel.tp_size
tensor_parallel.tp.tp_size tensor_parallel.partition_config tensor_parallel.preset_model
pipeline_parallel.pp_size expert_parallel optimizer.type optimizer.params.lr scheduler.type
scheduler.params.warmup_num_steps data_types.keep_in_fp32_modules disable_python_gc
seq_parallel_communication_data_type tensor_parallel.vocab_parallel_lm_head
tensor_parallel.vocab_parallel_ce_backend compile.offload_activation_pin_memory
"""
PATHS = [f"zero_optimization.{name}" for name in ZERO.split()] + TOP.split()


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
def test_known_with_null_and_with_its_default(path: str) -> None:
    assert resolve(load(nested(path, None)), world_size=2)
    key = next((key for key in KEYS if path in (key.path, *_aliases(key))), None)
    if key is not None and key.default is not None and not key.path.startswith(("optimizer", "scheduler")):
        resolved = resolve(load(nested(path, key.default)), world_size=2)
        assert resolved.unsupported == ()
        assert [notice for notice in resolved.notices if notice.path == path] == []


def _aliases(key: Any) -> list[str]:
    block = key.path.rpartition(".")[0]
    return [f"{block}.{alias}" if block else alias for alias in key.aliases]


@pytest.mark.parametrize("path", PATHS)
def test_a_typing_mistake_names_the_key(path: str) -> None:
    block, _, name = path.rpartition(".")
    mistaken = f"{name[:-1]}{'x' if name[-1] != 'x' else 'y'}"
    with pytest.raises(ConfigError) as caught:
        resolve(load(nested(f"{block}.{mistaken}" if block else mistaken, 1)), world_size=2)
    assert caught.value.path.endswith(mistaken) or "needs" in str(caught.value)
