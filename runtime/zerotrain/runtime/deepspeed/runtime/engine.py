"""`deepspeed.runtime.engine`: the engine's class."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

__getattr__ = attributes_of(__name__)
