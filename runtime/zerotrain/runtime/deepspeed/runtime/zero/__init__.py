"""`deepspeed.runtime.zero`: only the module in which libraries look for the states of parameters."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.runtime.zero import partition_parameters

__all__ = ["partition_parameters"]

__getattr__ = attributes_of(__name__)
