"""`deepspeed.runtime.zero`: names of `partition_parameters`, from which scripts import them, too."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.runtime.zero import partition_parameters
from zerotrain.runtime.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
]

__getattr__ = attributes_of(__name__)
