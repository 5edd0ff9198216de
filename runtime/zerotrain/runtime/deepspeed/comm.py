"""`deepspeed.comm`: torch.distributed, which has the functions under the same names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zerotrain.runtime.comm.start import init_distributed
from zerotrain.runtime.deepspeed.absent import text_for
from zerotrain.runtime.deepspeed.utils.groups import _get_world_group as get_world_group
from zerotrain.runtime.deepspeed.utils.logging import log_dist
from zerotrain.runtime.facade.arguments import refuse_unless_default
from zerotrain.runtime.zero.running import cores

__all__ = ["get_local_rank", "get_world_group", "init_distributed", "log_summary"]

__path__: list[str] = []  # as of `attributes_of`


def get_local_rank() -> int:
    """Return the number of this rank on its host, which the launcher sets."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Log what rank 0 has sent to the others so far, by operation, one line for each open engine; the
    script's own collectives are not counted. No communication.

    `show_straggler` changes nothing: `last_step.rank_wait_seconds` tells how long each rank waited. Raises
    ValueError for `return_dict`.
    """
    way_out = "leave it out; engine.comm.bytes_sent is such a dictionary"
    refuse_unless_default("log_summary()", "return_dict", return_dict, False, way_out)
    for core in cores():
        sent = (f"{name} {num_bytes / 2**20:.1f} MiB" for name, num_bytes in core.comm.bytes_sent.items())
        log_dist(f"sent by {type(core.model).__name__}: {', '.join(sent) or 'nothing'}", ranks=[0])


def __getattr__(name: str) -> Any:
    if not hasattr(dist, name):
        raise AttributeError(text_for(__name__, name))
    return getattr(dist, name)
