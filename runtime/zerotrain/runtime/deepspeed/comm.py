"""`deepspeed.comm`: torch.distributed, which has the functions under the same names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.deepspeed.absent import text_for

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    if not hasattr(dist, name):
        raise AttributeError(text_for(__name__, name))
    return getattr(dist, name)
