"""`deepspeed.ops`: only its optimizers, of which torch's or the engine's own do the work."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

__getattr__ = attributes_of(__name__)
