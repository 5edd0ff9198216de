"""`deepspeed.utils.logging`: the logger, and lines for some of the ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.script_log import script_logger

__all__ = ["log_dist", "logger"]

__getattr__ = attributes_of(__name__)

logger = script_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks; on all of them for None or [-1]."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)
