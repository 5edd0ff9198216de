"""Every configuration that users bring loads as it stands, also those that DeepSpeed rejects."""

from __future__ import annotations

import pytest

from zerotrain.contract.config import EngineConfig, load, resolve

pytestmark = pytest.mark.unit


_NBSP = "\u00a0"

LARGE_MODEL_CPU_OFFLOAD = f"""// eight ranks, 70B
{{
"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
{_NBSP}
"bf16": {{ "enabled": true }},
{_NBSP}
"zero_optimization": {{
"stage": 3,
"offload_optimizer": {{"device": "cpu", "pin_memory": true}},
"offload_param": {{
"device": "none", // or "cpu" if it's too big
"pin_memory": true
}},
"overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": 5e8,
"stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6,
"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
"stage3_gather_16bit_weights_on_model_save": true
}},
{_NBSP}
"gradient_clipping": 1.0, "wall_clock_breakdown": false,
{_NBSP}
"optimizer": {{"type": "AdamW",
"params": {{"lr": 5e-6, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}}}}
}}
"""

STAGE_2_FP16 = """{
"train_batch_size": 256, "gradient_accumulation_steps": 4, "fp16": {"enabled": true},
"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "contiguous_gradients": true,
"overlap_comm": true, "reduce_scatter": true},
"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
}"""

STAGE_3_FP16_OFFLOAD = """{
"train_batch_size": 256, "gradient_accumulation_steps": 16, "gradient_clipping": 1.0,
"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
"offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
"reduce_bucket_size": 500000000, "stage3_prefetch_bucket_size": 500000000,
"stage3_param_persistence_threshold": 1000000}
}"""

STAGE_ONLY = '{"zero_optimization": {"stage": 2}}'
BUCKETS_ONLY = (
    '{\n"reduce_bucket_size": 500_000_000, # elements, not "MB"\n"allgather_bucket_size": 500_000_000\n}'
)
OVERLAP_ONLY = '{"overlap_comm": true, # at stage 3\n"contiguous_gradients": true}'

AUTO_BUCKETS = """{
"bf16": { "enabled": true },
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
"offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
"sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
"gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 1,
"wall_clock_breakdown": false
}"""

PATTERN_FINE_TUNE = """// A: "one node"
{
"bf16": {"enabled": true},
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
"offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
"stage3_max_live_parameters": 2e9, "stage3_prefetch_bucket_size": 5e8,
"stage3_gather_16bit_weights_on_model_save": true},
"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}
}"""

PATTERN_PRETRAIN = """// B
{
"bf16": {"enabled": true},
"zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true,
"reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8},
"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
"activation_checkpointing": {"partition_activations": false}
}"""

PATTERN_3D = """// C
{
"bf16": {"enabled": true},
"zero_optimization": {"stage": 1, "overlap_comm": true, "contiguous_gradients": true},
"tensor_parallel": {"tp_size": 8}, "pipeline_parallel": {"pp_size": 8},
"gradient_accumulation_steps": 16, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
"optimizer": {"type": "AdamW", "params": {"lr": 1.5e-4}},
"activation_checkpointing": {"partition_activations": true, "contiguous_memory_optimization": true}
}"""

SCALED_BF16 = """{
"bf16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
"hysteresis": 2, "min_loss_scale": 1},
"fp16": {"enabled": false, "opt_level": "O2"}, "train_micro_batch_size_per_gpu": 2,
"zero_optimization": {"stage": 2}
}"""

CHAT = """{
"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "bfloat16": {"enabled": true},
"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
"stage3_max_live_parameters": 3e7, "memory_efficient_linear": false},
"hybrid_engine": {"enabled": false, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": true}
}"""

FILES = {
    # name: (text, ranks, stage, (train, micro, accumulation), paths that this version does not run)
    "70B, offload": (
        LARGE_MODEL_CPU_OFFLOAD,
        8,
        3,
        (64, 1, 8),
        set(),
    ),
    "stage 2, fp16": (STAGE_2_FP16, 8, 2, (256, 8, 4), set()),
    "stage 3, fp16, offload": (
        STAGE_3_FP16_OFFLOAD,
        8,
        3,
        (256, 2, 16),
        set(),
    ),
    "stage only": (STAGE_ONLY, 8, 2, (8, 1, 1), set()),
    "buckets only": (BUCKETS_ONLY, 8, 0, (8, 1, 1), set()),
    "overlap only": (OVERLAP_ONLY, 8, 0, (8, 1, 1), set()),
    "auto buckets": (
        AUTO_BUCKETS,
        4,
        3,
        (16, 1, 4),
        set(),
    ),
    "pattern A": (
        PATTERN_FINE_TUNE,
        8,
        3,
        (64, 1, 8),
        set(),
    ),
    "keys of fp16 in bf16": (SCALED_BF16, 8, 2, (16, 2, 1), set()),
    "chat": (CHAT, 8, 2, (32, 4, 1), set()),
    "pattern B": (PATTERN_PRETRAIN, 32, 2, (128, 4, 1), set()),
    "pattern C": (PATTERN_3D, 64, 1, (1024, 1, 16), {"tensor_parallel.tp_size", "pipeline_parallel.pp_size"}),
}


@pytest.mark.parametrize(("text", "ranks", "stage", "sizes", "not_run"), FILES.values(), ids=FILES.keys())
def test_loads_and_shows(
    text: str, ranks: int, stage: int, sizes: tuple[int, int, int], not_run: set[str]
) -> None:
    config = resolve(load(text), world_size=ranks)
    batch = config.batch
    assert config.zero.stage == stage
    assert (batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps) == sizes
    assert {item.path for item in config.unsupported} == not_run
    assert all(item.reason and item.way_out for item in config.unsupported)
    assert config.report


def test_values_of_the_large_one() -> None:
    config = resolve(load(LARGE_MODEL_CPU_OFFLOAD), world_size=8)
    optimizer, zero = config.optimizer, config.zero
    assert optimizer is not None
    assert (optimizer.type, optimizer.lr, optimizer.betas) == ("AdamW", 5e-6, (0.9, 0.95))
    assert (optimizer.eps, optimizer.weight_decay, config.gradient_clipping) == (1e-8, 0.01, 1.0)
    assert (zero.sub_group_size, zero.prefetch_bucket_size) == (1_000_000_000, 500_000_000)
    assert type(zero.sub_group_size) is int
    assert zero.param_persistence_threshold == 1_000_000
    assert zero.gather_16bit_weights_on_model_save
    assert zero.offload_optimizer is not None
    assert zero.offload_optimizer.device == "cpu"
    assert zero.offload_param is None
    assert config.precision.compute_dtype == "bf16"


def test_the_blocks_alone_ask_for_activation_checkpointing() -> None:
    def configured(text: str) -> EngineConfig:
        return resolve(load(text), world_size=32)

    assert configured(PATTERN_PRETRAIN).activation_checkpointing.configured
    assert not configured(STAGE_ONLY).activation_checkpointing.configured


def test_advice_from_troubleshooting_tables() -> None:
    """Troubleshooting tables advise DeepSpeedCPUAdam, Cosine and the old switch; DeepSpeed rejects two of
    them.
    """
    text = """{"zero_optimization": {"stage": 2, "cpu_offload": true},
    "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4}},
    "scheduler": {"type": "Cosine", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}}"""
    config = resolve(load(text), world_size=2)
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert (config.optimizer.type, config.scheduler.type) == ("AdamW", "WarmupCosineLR")
    assert config.zero.offload_optimizer is not None
    assert {"optimizer.type", "scheduler.type", "zero_optimization.cpu_offload"} <= {
        notice.path for notice in config.notices
    }
