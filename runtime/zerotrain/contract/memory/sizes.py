"""The size of one unit, as the byte formulas take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSize:
    """One flat buffer of the model."""

    name: str
    numel: int
    """Elements without the padding at the end."""

    padded_numel: int
    """Elements with it; a multiple of ranks x 2048."""

    trainable: bool = True
    """Has gradients and optimizer states."""

    whole_pass: bool = False
    """Belongs to the model itself (tied weights, the rest): whole during all of forward and of backward."""

    stays_whole: bool = False
    """Holds small parameters, which every rank keeps at stage 3."""
