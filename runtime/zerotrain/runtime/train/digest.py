"""Whether what every rank holds is the same on all of them: a number per rank, exchanged now and then.

Weights that a rank has whole are computed from gathered bits, so they are equal to the bit; where they are
not, a memory error, a kernel or the network changed them, and the replicas train different models from then
on. At stage 3 that is true of the small units alone; the step, the rate and the loss scale are compared, too.
"""

from __future__ import annotations

import zlib

import torch

from zerotrain.runtime.engine import Engine

EVERY_STEPS = 100
"""A look reads the weights once, which each step does several times."""

_BITS = (1 << 52) - 1  # float64, which carries the record, holds 52-bit integers exactly

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_due(engine: Engine, *, is_first: bool) -> bool:
    """The same answer on every rank. The first step of a process is looked at, too: it follows a load."""
    return engine.world_size > 1 and (is_first or engine.global_steps % EVERY_STEPS == 0)


@torch.no_grad()
def digest(engine: Engine) -> float:
    """This rank's number, never 0. Collective where an update goes on in the background: it is waited for."""
    engine.synchronize()
    numbers = f"{engine.global_steps} {engine.optimizer.lr!r} {engine.pipeline.scaler.scale!r}"
    value = zlib.crc32(numbers.encode())
    for unit in engine.core.units:
        if not unit.placement.params_sharded:
            # What fills the buffer up to a multiple of the ranks is nobody's.
            value = (value * 1_000_003 + _sum_of_bits(unit.full.tensor[: unit.layout.numel])) & _BITS
    return float(value or 1)


def _sum_of_bits(weights: torch.Tensor) -> int:
    """Changes with any one bit; the order of additions does not matter."""
    return int(weights.view(_WORDS[weights.element_size()]).sum(dtype=torch.int64)) & _BITS
