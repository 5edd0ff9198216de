"""`deepspeed.runtime.base_optimizer`: the class of the engine's optimizer."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.optim.torch_face import TorchOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]

__getattr__ = attributes_of(__name__)
