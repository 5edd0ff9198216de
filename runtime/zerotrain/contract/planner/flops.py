"""Floating-point operations of a model's passes, by formula.

A weight costs two operations per token in a forward pass (multiply and add), two in backward for the gradient
of its input, and two for its own gradient unless it is frozen: the usual 6 N D. Causal attention is added.
Recomputed activations are not counted, so that a quotient of these operations and a device's peak is the
model FLOPs utilisation (MFU).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Sizes of a model from which its operations follow."""

    trained: int
    """Elements of trained parameters, without tables that are only looked up."""
    frozen: int = 0
    """The same of frozen parameters."""
    attention_width: int = 0
    """Layers x heads x size of a head; 0 = attention is not counted."""

    def forward(self, context: float) -> float:
        """Return the operations of one token in a forward pass over sequences of `context` tokens.

        A token attends to half of its sequence on average: scores and their product with the values are two
        products of that length.
        """
        return 2.0 * (self.trained + self.frozen) + 2.0 * context * self.attention_width

    def training(self, context: float) -> float:
        """Return the operations of one token in forward and backward."""
        return 3.0 * self.forward(context) - 2.0 * self.frozen
