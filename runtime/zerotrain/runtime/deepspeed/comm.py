"""`deepspeed.comm`: torch.distributed, which has the functions under the same names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.deepspeed.absent import text_for

__all__ = ["get_local_rank", "init_distributed"]

__path__: list[str] = []  # as of `attributes_of`


def get_local_rank() -> int:
    """Return the number of this rank on its host, which the launcher sets."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    if not hasattr(dist, name):
        raise AttributeError(text_for(__name__, name))
    return getattr(dist, name)
