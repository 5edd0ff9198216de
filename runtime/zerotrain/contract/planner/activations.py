"""Activations that forward keeps for backward, in bytes of one rank, which the engine's formulas leave out.

They are counted tensor by tensor on the trainer's models; tests count the same in a real forward pass. The
assumptions are in `ASSUMPTIONS`, which every plan prints. Other code for the same sizes keeps other tensors,
so for any other model this is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory.sizes import DTYPE_BYTES
from zerotrain.contract.memory.slots import num_slots

from .shape import Block, ModelShape

FP32 = 4
MASK = 1
ID = 8

ASSUMPTIONS = (
    "attention is fused: no matrix of tokens by tokens is ever stored",
    "forward keeps what the trainer's own models keep; the loss is taken in fp32 over all tokens at once",
    "compile.enabled changes no figure: what compiled units keep, and how fast they are, is not known",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Activations of one micro-batch on one rank."""

    kept_bytes: int
    """Bytes that all blocks keep from forward to backward, with autocast's copies of their weights."""
    head_bytes: int
    """Bytes that the final norm, the head and the loss keep, with autocast's copies of their weights."""
    head_work_bytes: int
    """Largest temporary tensors around the loss."""
    block_work_bytes: int
    """Largest temporary tensors within one block in backward, including what is recomputed there."""
    host_bytes: int = 0
    """Checkpointed inputs in host memory (`cpu_checkpointing`)."""
    moving_bytes: int = 0
    """One checkpointed input, which comes back to a GPU while the block after its own is recomputed."""
    cache_bytes: int = 0
    """Autocast's copies of the weights of recomputed blocks, which are freed at the end of forward."""
    last_kept_bytes: int = 0
    """Bytes of `kept_bytes` that are left when backward comes to its last block."""

    @property
    def least_bytes(self) -> int:
        """Bytes that exist in any case when the loss is known, or at the end of the blocks."""
        return self.kept_bytes + max(self.head_bytes, self.cache_bytes)

    @property
    def forward_bytes(self) -> int:
        """Bytes at the end of forward."""
        return self.kept_bytes + self.head_bytes + self.head_work_bytes + self.cache_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes at the start of backward, or in its first block, whichever is more."""
        return self.kept_bytes + max(self.head_bytes + self.head_work_bytes, self.block_work_bytes)

    @property
    def last_backward_bytes(self) -> int:
        """Bytes in the last block of backward, when almost all sums of gradients exist."""
        return self.last_kept_bytes + self.block_work_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Widths:
    """Bytes per element."""

    stream: int
    """Bytes per element of the residual stream and of what the norms keep of it."""
    product: int
    """Bytes per element of the inputs and outputs of linear layers and attention."""

    @property
    def is_cast(self) -> bool:
        """Whether every linear layer gets a copy of its input and of its weight (autocast)."""
        return self.stream != self.product

    @classmethod
    def of(cls, config: EngineConfig) -> _Widths:
        stream = config.precision.compute_dtype
        return cls(stream=DTYPE_BYTES[stream], product=DTYPE_BYTES[config.precision.autocast_dtype or stream])


def activations(shape: ModelShape, config: EngineConfig) -> Activations:
    """Return the activations of a model under a configuration."""
    tokens, width = config.batch.micro_batch_size * shape.context, _Widths.of(config)
    recompute = config.activation_checkpointing
    block, inputs = _block(shape, width), width.stream * shape.width
    kept = _kept_inputs(shape, config) * inputs if recompute.configured else shape.layers * block
    in_host = recompute.configured and recompute.cpu_checkpointing
    shared = tokens * ID
    if shape.block is Block.GATED:
        shared += 2 * width.stream * shape.head_dim * shape.context
    if shape.has_dropout and not recompute.configured:
        shared += tokens * MASK * shape.width
    copy = _weight_copy(shape, width)
    copies = shape.layers * copy
    head_copy = width.product * shape.vocabulary * shape.width if width.is_cast else 0
    head_work = FP32 if width.product == FP32 else FP32 + width.product
    return Activations(
        kept_bytes=(0 if in_host else tokens * kept) + shared + (0 if recompute.configured else copies),
        head_bytes=tokens * _head(shape, width) + head_copy,
        head_work_bytes=tokens * shape.vocabulary * head_work,
        block_work_bytes=tokens * _block_work(shape, width)
        + _fp8_work(shape, config, tokens)
        + (tokens * block + copy if recompute.configured else 0),
        host_bytes=tokens * kept if in_host else 0,
        moving_bytes=tokens * inputs if in_host else 0,
        cache_bytes=copies if recompute.configured else 0,
        last_kept_bytes=shared
        + (0 if in_host else tokens * inputs if recompute.configured else tokens * block + copy),
    )


def _kept_inputs(shape: ModelShape, config: EngineConfig) -> int:
    """Return the slots for inputs of recomputed blocks: one for each, or those of whole buffers."""
    recompute = config.activation_checkpointing
    if not recompute.contiguous_memory_optimization:
        return shape.layers
    return num_slots(shape.layers, recompute.number_checkpoints)


def _weight_copy(shape: ModelShape, width: _Widths) -> int:
    """Return the bytes of autocast's copies of one block's matrices, equal on all ranks and stages."""
    if not width.is_cast:
        return 0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = 3 if shape.block is Block.GATED else 2
    return width.product * shape.width * (2 * queries + 2 * keys + matrices * shape.inner)


def _block(shape: ModelShape, width: _Widths) -> int:
    """Return the bytes that one block keeps of one token."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = width.product * (2 * queries + 2 * keys) + FP32 * shape.heads
    if shape.block is Block.GATED:
        # Linear layers share their input, but each has a cast copy of its own: three and two of them.
        normed = width.product * shape.width * (5 if width.is_cast else 2)
        norms = 2 * _rms_norm(shape.width, width.stream) + normed
        head_norms = _rms_norm(queries, width.product, shape.heads)
        head_norms += _rms_norm(keys, width.product, shape.kv_heads)
        inner = 4 * width.product * shape.inner
        return norms + attention + (head_norms if shape.head_norms else 0) + inner
    norms = 2 * ((width.stream + width.product) * shape.width + 2 * FP32)
    masks = 2 * MASK * shape.width if shape.has_dropout else 0
    return norms + attention + 2 * width.product * shape.inner + masks


def _rms_norm(numel: int, width: int, rows: int = 1) -> int:
    """Return the bytes of the fp32 copy of its input, a root per row, and the normed input."""
    return FP32 * numel + FP32 * rows + width * numel


def _head(shape: ModelShape, width: _Widths) -> int:
    """Return the bytes of the final norm, the head's input, log-probabilities and labels, per token."""
    if shape.block is Block.GATED:
        norm = _rms_norm(shape.width, width.stream)
    else:
        norm = width.stream * shape.width + 2 * FP32
    return norm + width.product * shape.width + FP32 * shape.vocabulary + ID


def _block_work(shape: ModelShape, width: _Widths) -> int:
    """Return the bytes of the gradients of a block's widest part, per token.

    They are three of the MLP's inner tensors and two of the stream.
    """
    return 3 * width.product * shape.inner + 2 * width.stream * shape.width


def _fp8_work(shape: ModelShape, config: EngineConfig, tokens: int) -> int:
    """Return the bytes of copies and codes that FP8 products of a block's widest layer need at once.

    An operand is scaled into a bf16 copy, which becomes codes; a transposed operand is copied in bf16 first.
    Activations are kept in bf16, as without FP8.
    """
    if not config.fp8.enabled:
        return 0
    rows, weight = tokens * shape.inner, shape.width * shape.inner
    transposed = 2 + 2 + 1
    peaks = [rows * (2 + 1), rows + weight * transposed]
    if config.fp8.weight_gradient == "fp8":
        peaks.append(rows * transposed)
    return max(peaks)
