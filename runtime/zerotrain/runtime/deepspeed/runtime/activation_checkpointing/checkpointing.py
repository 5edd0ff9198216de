"""`deepspeed.runtime.activation_checkpointing.checkpointing`: the names of `deepspeed.checkpointing`."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

__getattr__ = attributes_of(__name__)
