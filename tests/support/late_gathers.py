"""Gathers that land when they are waited for: until then what they fill holds NaN."""

from __future__ import annotations

from typing import Any

import torch

from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.engine import Engine


def land_late(engine: Engine) -> None:
    """Let gathers of weights, from now on, write nothing but NaN before the wait for them, so that a use that
    misses its wait shows. This rank's own part stays."""
    gather = engine.comm.all_gather

    @torch.no_grad()
    def late(full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        arrived = torch.empty_like(full)
        pending = gather(arrived, shard.clone(), label=label)
        for rank, part in enumerate(full.view(engine.world_size, -1)):
            if rank != engine.global_rank and part.is_floating_point():
                part.fill_(float("nan"))

        @torch.no_grad()
        def wait() -> None:
            pending.wait()
            full.copy_(arrived)

        return Pending(wait)

    changed: Any = engine.comm
    changed.all_gather = late
