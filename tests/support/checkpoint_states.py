"""Checkpoint states with known contents, and ranks as threads, for tests of the checkpoint package."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from zerotrain.runtime.zero.layout import ModelLayout, ParameterFact, build_unit
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, CheckpointState, TensorStream

T = TypeVar("T")

# torch connects to numpy on first use, under a C++ lock. If two threads do that first use together, this lock
# deadlocks with the interpreter's. Real ranks are processes; only in these tests are they threads.
torch.zeros(1).numpy()

ALIGN = 4  # tiny, so that shard boundaries lie inside parameters

UNITS: tuple[tuple[str, bool, tuple[tuple[str, tuple[int, ...]], ...]], ...] = (
    ("embed", True, (("embed.weight", (13, 5)),)),
    ("blocks.0", True, (("blocks.0.w", (7, 9)), ("blocks.0.b", (7,)), ("blocks.0.scale", ()))),
    ("frozen", False, (("lora.base", (11, 3)),)),
)
REGROUPED = (
    ("all", True, tuple(item for _, trainable, items in UNITS if trainable for item in items)),
    UNITS[2],
)
"""The same parameters in other units, as after a change of the unit boundaries."""


def layout_for(world_size: int, units: Sequence[tuple[str, bool, tuple]] = UNITS) -> ModelLayout:  # type: ignore[type-arg]
    """Return the layout of the test model for so many ranks."""
    return ModelLayout(
        units=tuple(
            build_unit(
                name=name,
                module=name,
                trainable=trainable,
                parameters=[ParameterFact(fqn=fqn, shape=shape, dtype="bf16") for fqn, shape in items],
                world_size=world_size,
                align=ALIGN,
            )
            for name, trainable, items in units
        ),
        world_size=world_size,
        align=ALIGN,
        aliases={"head.weight": "embed.weight"},
    )


def full_value(fqn: str, kind: str, numel: int, salt: int = 0) -> torch.Tensor:
    """Return a whole parameter, 1-D fp32, with distinct elements that depend on name, kind and salt alone."""
    generator = torch.Generator().manual_seed(sum(map(ord, fqn + kind)) * 7919 + salt)
    return torch.randn(numel, generator=generator)


def make_state(
    rank: int, layout: ModelLayout, *, salt: int = 0, filled: bool = True, kinds: Sequence[str] = ()
) -> CheckpointState:
    """Return one rank's state. `filled=False` gives a state of NaN everywhere, to be loaded into."""
    streams = {}
    for unit in layout.units:
        low, high = layout.shard_range(unit, rank)
        for kind in kinds or ((MASTER, EXP_AVG, EXP_AVG_SQ) if unit.trainable else (PARAM,)):
            dtype = torch.float32 if unit.trainable else torch.bfloat16
            whole = torch.zeros(unit.padded_numel)
            for segment in unit.segments:
                whole[segment.start : segment.stop] = full_value(segment.fqn, kind, segment.numel, salt)
            shard = whole[low:high].to(dtype)
            streams[unit.name, kind] = TensorStream(shard if filled else torch.full_like(shard, math.nan))
    return CheckpointState(
        layout=layout,
        rank=rank,
        world_size=layout.world_size,
        streams=dict(streams),
        scalars={"step": 3 + salt, "scheduler": {"last": 0.1}} if filled else {},
        buffers={"norm.mean": torch.arange(4.0) + salt if filled else torch.zeros(4)},
    )


class ThreadRanks:
    """The RankGroup of one thread; all threads share a barrier."""

    def __init__(self, rank: int, world_size: int, shared: list[object], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = world_size
        self._shared = shared
        self._barrier = barrier

    def _exchange(self, value: object) -> list[object]:
        self._shared[self.rank] = value
        self._barrier.wait()
        everyone = list(self._shared)
        self._barrier.wait()
        return everyone

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(record) for record in self._exchange(tuple(values))]  # type: ignore[arg-type]

    def broadcast_text(self, text: str, *, source: int) -> str:
        return str(self._exchange(text)[source])


def on_ranks(world_size: int, action: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """Run `action` on every rank of a group of threads; an exception of a rank is its result."""
    shared: list[object] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=180)

    def run(rank: int) -> T | Exception:
        try:
            return action(ThreadRanks(rank, world_size, shared, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def good(results: Sequence[T | Exception]) -> list[T]:
    """Return the results if no rank failed; raise the first failure otherwise."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if not isinstance(result, Exception)]
