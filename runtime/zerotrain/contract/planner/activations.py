"""What forward keeps for backward, in bytes of one rank: what the engine's own formulas leave out.

Counted tensor by tensor on the models the trainer builds; tests count the same in a real forward pass. What
it rests on is `ASSUMPTIONS`, which every plan prints. Other code for the same sizes keeps other tensors, so
this is an estimate wherever the model is somebody else's.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory.model import DTYPE_BYTES

from .shape import Block, ModelShape

FP32 = 4
MASK = 1
ID = 8

ASSUMPTIONS = (
    "attention is fused: no matrix of tokens by tokens is ever stored",
    "forward keeps what the trainer's own models keep; the loss is taken in fp32 over all tokens at once",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Of one micro-batch on one rank."""

    kept_bytes: int
    """Kept from forward to backward, all blocks together."""
    head_bytes: int
    """Kept by the final norm, the head and the loss."""
    head_work_bytes: int
    """The largest tensors that come and go around the loss."""
    block_work_bytes: int
    """The same within one block in backward, its recomputed activations included."""
    host_bytes: int = 0
    """Checkpointed inputs in host memory (`cpu_checkpointing`)."""

    @property
    def least_bytes(self) -> int:
        """There in any case when the loss is known."""
        return self.kept_bytes + self.head_bytes

    @property
    def forward_bytes(self) -> int:
        """At the end of forward."""
        return self.kept_bytes + self.head_bytes + self.head_work_bytes

    @property
    def backward_bytes(self) -> int:
        """At the start of backward, or in its first block, whichever is more."""
        return self.kept_bytes + max(self.head_bytes + self.head_work_bytes, self.block_work_bytes)


def activations(shape: ModelShape, config: EngineConfig) -> Activations:
    """Activations of a model under a configuration."""
    tokens = config.batch.micro_batch_size * shape.context
    width = DTYPE_BYTES[config.precision.compute_dtype]
    recompute = config.activation_checkpointing
    block = _block(shape, width)
    inputs = width * shape.width
    kept = inputs if recompute.configured else block
    in_host = recompute.configured and recompute.cpu_checkpointing
    shared = tokens * ID + (2 * width * shape.head_dim * shape.context if shape.block is Block.GATED else 0)
    if shape.has_dropout and not recompute.configured:
        shared += tokens * MASK * shape.width
    return Activations(
        kept_bytes=(0 if in_host else tokens * shape.layers * kept) + shared,
        head_bytes=tokens * _head(shape, width),
        head_work_bytes=tokens * shape.vocabulary * (FP32 if width == FP32 else FP32 + width),
        block_work_bytes=tokens * (_block_work(shape, width) + (block if recompute.configured else 0)),
        host_bytes=tokens * shape.layers * inputs if in_host else 0,
    )


def _block(shape: ModelShape, width: int) -> int:
    """Bytes that one block keeps of one token."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = width * (2 * queries + 2 * keys) + FP32 * shape.heads
    if shape.block is Block.GATED:
        norms = 2 * _rms_norm(shape.width, width) + 2 * width * shape.width
        head_norms = _rms_norm(queries, width, shape.heads) + _rms_norm(keys, width, shape.kv_heads)
        return norms + attention + (head_norms if shape.head_norms else 0) + 4 * width * shape.inner
    norms = 2 * (2 * width * shape.width + 2 * FP32)
    masks = 2 * MASK * shape.width if shape.has_dropout else 0
    return norms + attention + 2 * width * shape.inner + masks


def _rms_norm(numel: int, width: int, rows: int = 1) -> int:
    """The fp32 copy of its input, a root per row, and the normed input."""
    return FP32 * numel + FP32 * rows + width * numel


def _head(shape: ModelShape, width: int) -> int:
    """Final norm, input of the head, log-probabilities, labels."""
    if shape.block is Block.GATED:
        norm = _rms_norm(shape.width, width)
    else:
        norm = width * shape.width + 2 * FP32
    return norm + width * shape.width + FP32 * shape.vocabulary + ID


def _block_work(shape: ModelShape, width: int) -> int:
    """Gradients of the widest part of a block: three of the MLP's inner tensors and two of the stream."""
    return width * (3 * shape.inner + 2 * shape.width)
