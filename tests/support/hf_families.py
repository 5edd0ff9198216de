"""Tiny models of many families of the transformers library, made and saved by the library alone.

Every function imports transformers itself: `use_stage_3` must come first in a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DECODER: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "pad_token_id": 0}
_ENCODER_DECODER: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "dropout": 0.0}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", "llama", _DECODER),
    "llama tied": ("AutoModelForCausalLM", "llama", {**_DECODER, "tie_word_embeddings": True}),
    "mistral": ("AutoModelForCausalLM", "mistral", _DECODER),
    "qwen2 tied": ("AutoModelForCausalLM", "qwen2", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": ("AutoModelForCausalLM", "qwen3", {**_DECODER, "head_dim": 8}),
    "phi3": ("AutoModelForCausalLM", "phi3", _DECODER),
    "gemma2": ("AutoModelForCausalLM", "gemma2", {**_DECODER, "head_dim": 8}),
    "mixtral": ("AutoModelForCausalLM", "mixtral", {**_DECODER, "num_local_experts": 4}),
    "qwen3 moe": (
        "AutoModelForCausalLM",
        "qwen3_moe",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt2": (
        "AutoModelForCausalLM",
        "gpt2",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "opt": ("AutoModelForCausalLM", "opt", {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bert masked": ("AutoModelForMaskedLM", "bert", _SMALL),
    "bert classes": ("AutoModelForSequenceClassification", "bert", {**_SMALL, "num_labels": 3}),
    "distilbert": (
        "AutoModelForMaskedLM",
        "distilbert",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
         "sinusoidal_pos_embds": True, "max_position_embeddings": 64},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        "t5",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4},
    ),
    "vit": ("AutoModelForImageClassification", "vit", {**_VISION, "num_labels": 4}),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        {**_ENCODER_DECODER, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
         "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 3},
    ),
    "clip": (
        "AutoModel",
        "clip",
        {"text_config": {**_SMALL, "eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16},
    ),
    "wav2vec2": (
        "AutoModelForCTC",
        "wav2vec2",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    ),
    "mamba": (
        "AutoModelForCausalLM",
        "mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
         "time_step_rank": 4},
    ),
}  # fmt: skip
"""Auto class, model type and sizes."""


def use_stage_3() -> None:
    """Let `import deepspeed` give the engine's module, and transformers load by ranges under stage 3."""
    import zerotrain.compat

    zerotrain.compat.deepspeed()
    import transformers

    from zerotrain.runtime.models.from_pretrained import take_over

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    take_over(transformers.modeling_utils)


def config(world_size: int, **zero: Any) -> dict[str, Any]:
    """Return a stage 3 configuration that shards every parameter."""
    return {
        "train_batch_size": world_size,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


@contextmanager
def stage_3(world_size: int) -> Iterator[None]:
    """Keep a configuration of stage 3 alive, as `TrainingArguments(deepspeed=...)` does."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config(world_size))  # type: ignore[no-untyped-call]
    yield
    del alive


def class_of(family: str) -> Any:
    """Return the auto class of a family."""
    import transformers

    return getattr(transformers, FAMILIES[family][0])


def config_of(family: str, **changes: Any) -> Any:
    """Return the library's configuration of a family."""
    import transformers

    _, kind, sizes = FAMILIES[family]
    return transformers.AutoConfig.for_model(kind, **{**sizes, **changes})


def save(family: str, folder: Path, *, max_shard_size: str = "30KB", **changes: Any) -> None:
    """Save a model with random weights only; fresh ones have biases of zero and norms of one."""
    torch.manual_seed(3)
    model = class_of(family).from_config(config_of(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def differing(first: Any, second: Any, *, in_fp32: bool = False) -> list[str]:
    """Return the names of tensors of two state dicts whose bits, dtypes or shapes differ, as stored or in
    fp32."""
    found = sorted(set(first) ^ set(second))
    for name in set(first) & set(second):
        one, other = (each[name].detach().clone() for each in (first, second))
        if in_fp32:
            one, other = one.float(), other.float()
        if (
            one.dtype != other.dtype
            or one.shape != other.shape
            or not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        ):
            found.append(name)
    return found
