"""`deepspeed.checkpoint`: only the names that libraries import from it; the engine itself writes
checkpoints."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.checkpoint import utils

__all__ = ["utils"]

__getattr__ = attributes_of(__name__)
