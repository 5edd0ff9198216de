"""`deepspeed.checkpointing`: activation checkpointing under its names."""

from __future__ import annotations

from zerotrain.runtime.activation.checkpoint import checkpoint_activations as checkpoint
from zerotrain.runtime.activation.random_states import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from zerotrain.runtime.activation.settings import checkpointing_is_configured as is_configured
from zerotrain.runtime.activation.settings import configure_checkpointing as configure
from zerotrain.runtime.activation.settings import reset_checkpointing as reset
from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "reset",
]

__getattr__ = attributes_of(__name__)
