"""`deepspeed.ops`: only its optimizers, implemented by torch's or the engine's own."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

__getattr__ = attributes_of(__name__)
