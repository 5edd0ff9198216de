"""`deepspeed.runtime.activation_checkpointing`: only the module that scripts import from it."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]

__getattr__ = attributes_of(__name__)
