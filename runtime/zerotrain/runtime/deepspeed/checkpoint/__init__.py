"""`deepspeed.checkpoint`: only what libraries import from it; checkpoints are the engine's."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.checkpoint import utils

__all__ = ["utils"]

__getattr__ = attributes_of(__name__)
