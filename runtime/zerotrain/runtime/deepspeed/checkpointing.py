"""`deepspeed.checkpointing`: activation checkpointing under its names."""

from __future__ import annotations

from zerotrain.runtime.activation.checkpoint import checkpoint_activations as checkpoint
from zerotrain.runtime.activation.settings import checkpointing_is_configured as is_configured
from zerotrain.runtime.activation.settings import configure_checkpointing as configure
from zerotrain.runtime.activation.settings import reset_checkpointing as reset
from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

__getattr__ = attributes_of(__name__)
