"""The size of one unit, as the byte formulas use it."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of the compute precisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSize:
    """One flat buffer of the model."""

    name: str
    numel: int
    """Elements without the padding at the end."""

    padded_numel: int
    """Elements with the padding; a multiple of ranks x 2048."""

    trainable: bool = True
    """Whether the unit has gradients and optimizer states."""

    whole_pass: bool = False
    """Whether the unit belongs to the model itself (tied weights, the rest).

    It is then whole during all of forward and of backward.
    """

    stays_whole: bool = False
    """Whether the unit holds small parameters, which every rank keeps at stage 3."""

    matrix_numel: int | None = None
    """Elements in matrices; None = all may be."""

    element_bytes: int | None = None
    """Bytes per element of a frozen weight in its own dtype; None = as in the compute precision."""

    def weight_numel(self, compute_bytes: int) -> int:
        """Return the elements of the compute precision that take as much memory as the weights."""
        return self.padded_numel * (self.element_bytes or compute_bytes) // compute_bytes
