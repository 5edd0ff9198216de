"""`deepspeed.runtime.utils`: reports of memory use, seeds and clipping."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.facade.memory import memory_status, see_memory_usage

__all__ = ["clip_grad_norm_", "memory_status", "see_memory_usage", "set_random_seed"]

__getattr__ = attributes_of(__name__)


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's (if the program uses it) and torch's generators."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        library: Any = numpy
        library.random.seed(seed)
    torch.manual_seed(seed)
