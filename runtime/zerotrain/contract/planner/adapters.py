"""Sizes of LoRA adapters beside a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerotrain.contract.memory import ModuleSize

if TYPE_CHECKING:
    from .shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Two matrices, [rank, inputs] and [outputs, rank], beside each target of every block."""

    rank: int
    targets: tuple[str, ...] = ()
    """Last parts of the names of the layers; empty = every linear layer of a block."""

    def modules(self, shape: ModelShape) -> tuple[ModuleSize, ...]:
        """Return the adapters of each block as a module. A layer of an unknown name counts as the widest."""
        known = _layers(shape)
        sizes = [known.get(name, (shape.width, shape.inner)) for name in self.targets or known]
        parameters: Sequence[int] = [self.rank * numel for pair in sizes for numel in pair]
        return tuple(
            ModuleSize(name=f"(adapters {index})", parameters=tuple(parameters))
            for index in range(shape.layers)
        )


def _layers(shape: ModelShape) -> Mapping[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers of a gated block, by name."""
    width, inner = shape.width, shape.inner
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (width, queries),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (queries, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }
