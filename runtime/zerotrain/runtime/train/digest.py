"""Check that the replicated state is the same on all ranks: a digest per rank, exchanged at intervals.

Replicated weights are computed from gathered bits, so they are equal to the bit. Where they are not, a memory
error, a kernel or the network changed them, and the replicas train different models from then on. At stage 3
this covers the small units only. The step, the learning rate and the loss scale are compared, too.
"""

from __future__ import annotations

import zlib

import torch

from zerotrain.runtime.engine import Engine

EVERY_STEPS = 100
"""Steps between two digests. A digest reads the weights once; each step reads them several times."""

_BITS = (1 << 52) - 1  # float64, which carries the record, holds 52-bit integers exactly

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_due(engine: Engine, *, is_first: bool) -> bool:
    """Return whether a digest is due; the same on every rank. The first step of a process is checked, too: it
    may follow a load."""
    return engine.world_size > 1 and (is_first or engine.global_steps % EVERY_STEPS == 0)


@torch.no_grad()
def digest(engine: Engine) -> float:
    """Return this rank's digest, never 0. Wait for an update in the background; collective if there is
    one."""
    engine.synchronize()
    engine.pipeline.settle()
    numbers = f"{engine.global_steps} {engine.optimizer.lr!r} {engine.pipeline.scaler.scale!r}"
    value = zlib.crc32(numbers.encode())
    for unit in engine.core.units:
        if not unit.placement.params_sharded:
            # The padding up to a multiple of the number of ranks is not part of the state.
            value = (value * 1_000_003 + _sum_of_bits(unit.full.tensor[: unit.layout.numel])) & _BITS
    return float(value or 1)


def _sum_of_bits(weights: torch.Tensor) -> int:
    """Return a sum that changes with any single bit and does not depend on the order of additions."""
    return int(weights.view(_WORDS[weights.element_size()]).sum(dtype=torch.int64)) & _BITS
