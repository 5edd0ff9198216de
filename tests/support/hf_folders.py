"""Tiny Hugging Face models with random weights, saved as the library saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral sliding": ("mistral", {"sliding_window": 4}),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
}


def model_of(case: str) -> Any:
    """Return the library's model with random weights only.

    Fresh models have biases of zero and norms of one.
    """
    import transformers

    family, extra = CASES[case]
    sizes = {"vocab_size": 96} if family == "gpt2" else SIZES
    config = transformers.AutoConfig.for_model(family, **{**sizes, **extra})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def save(case: str, folder: Path, *, max_shard_size: str = "5GB") -> Any:
    """Save a model and return it."""
    model = model_of(case)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def token_ids(batch: int = 2, tokens: int = 24) -> torch.Tensor:
    """Return token ids below 96."""
    return torch.randint(0, 96, (batch, tokens), generator=torch.Generator().manual_seed(1))
