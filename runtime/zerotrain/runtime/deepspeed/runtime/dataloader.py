"""`deepspeed.runtime.dataloader`: the loader that begins again when it ends."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.utils import RepeatingLoader

__all__ = ["RepeatingLoader"]

__getattr__ = attributes_of(__name__)
