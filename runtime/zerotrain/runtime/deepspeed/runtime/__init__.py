"""`deepspeed.runtime`: only the names that scripts import from it."""

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "dataloader",
    "engine",
    "lr_schedules",
    "utils",
    "zero",
]

__getattr__ = attributes_of(__name__)
