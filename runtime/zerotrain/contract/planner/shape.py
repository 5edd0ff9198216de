"""The planner's description of a model that is not built: sizes of its modules, and kind of its activations.

`zerotrain plan` and the operator's admission call it. The sizes are those of the trainer's models; tests
compare them with built ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.memory import (
    MIN_UNIT_NUMEL,
    ModuleSize,
    UnitSize,
    arrange_units,
    gpt_modules,
    small_parameters,
)
from zerotrain.contract.train_spec import GptSpec

BYTE_VOCABULARY = 256
GUESSED_VOCABULARY = 32_000
MAX_GUESSED_LAYERS = 256
GUESSED_ASPECT = 128
"""Ratio of width to layers of a model with only its number of parameters known, as in 7 B models."""


class ShapeError(ValueError):
    """The model's sizes cannot be determined; the message says what is missing and what to give."""


class Block(Enum):
    """Kind of a transformer block, by the tensors that it keeps for backward."""

    GPT = "gpt"
    """LayerNorm, attention, GELU between two linear layers."""
    GATED = "gated"
    """RMSNorm in fp32, rotary attention, a gated MLP (Llama and similar models)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """LoRA: two matrices, [rank, inputs] and [outputs, rank], beside each target of every block."""

    rank: int
    targets: tuple[str, ...] = ()
    """Last parts of the names of the layers; empty = every linear layer of a block."""

    def modules(self, shape: ModelShape) -> tuple[ModuleSize, ...]:
        """Return the adapters of each block as a module. A layer of an unknown name counts as the widest."""
        known = _layers(shape)
        sizes = [known.get(name, (shape.width, shape.inner)) for name in self.targets or known]
        parameters = [self.rank * numel for pair in sizes for numel in pair]
        return tuple(
            ModuleSize(name=f"(adapters {index})", parameters=tuple(parameters))
            for index in range(shape.layers)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a causal language model."""

    source: str
    """Source of the sizes, as text."""
    modules: tuple[ModuleSize, ...]
    """Modules in the model's order."""
    block: Block
    width: int
    """[D] width of the residual stream."""
    inner: int
    """[F] width of the MLP."""
    layers: int
    """[L] number of layers."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    """[V] size of the vocabulary."""
    context: int
    """[T] tokens per sample."""
    is_tied: bool = True
    """Whether the head is the embedding."""
    head_norms: bool = False
    """Whether queries and keys are normed per head (Qwen3)."""
    has_dropout: bool = False
    """Whether dropout masks are kept as well (GPT-2 with its own defaults)."""
    adapters: Adapters | None = None
    """Adapters that are trained in place of the model, whose weights are then frozen."""
    is_guess: bool = False
    """Whether only the number of parameters is known; the rest follows from usual proportions."""

    @property
    def parameters(self) -> int:
        """[P] elements of all parameters."""
        return sum(sum(module.parameters) for module in self.modules)

    @property
    def matmul_parameters(self) -> int:
        """Elements that every token is multiplied with.

        The embedding tables are only looked up, so they do not count.
        """
        looked_up = sum(sum(module.parameters) for module in self.modules if module.name in _TABLES)
        return self.parameters - looked_up + (self.vocabulary * self.width if self.is_tied else 0)

    def units(self, config: EngineConfig, *, on_host: bool) -> tuple[UnitSize, ...]:
        """Return the units that the engine makes of the model under this configuration."""
        least = config.zero.module_granularity_threshold or MIN_UNIT_NUMEL
        small, ranks = small_parameters(config, on_host=on_host), config.world_size
        units = _arranged(self.modules, ranks, least, small)
        if self.adapters is None:
            return units
        frozen = tuple(replace(unit, trainable=False) for unit in units)
        # A block is a unit whatever its size, and its adapters are its trainable part.
        return frozen + _arranged(self.adapters.modules(self), ranks, 1, small)


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


@lru_cache(maxsize=16)
def _arranged(
    modules: tuple[ModuleSize, ...], world_size: int, least: int, small: tuple[int, int]
) -> tuple[UnitSize, ...]:
    """Return the units.

    Results are cached for searches, most of whose configurations differ in other settings.
    """
    return arrange_units(modules, world_size=world_size, min_unit_numel=least, small=small)


_TABLES = frozenset(
    {"embed", "position", "model.embed_tokens", "transformer.wte", "transformer.wpe", "(embedding)"}
)


def gpt_shape(spec: GptSpec, *, source: str) -> ModelShape:
    """Return the shape of the trainer's byte-level GPT."""
    return ModelShape(
        source=source,
        modules=gpt_modules(d_model=spec.d_model, layers=spec.layers, context=spec.context),
        block=Block.GPT,
        width=spec.d_model,
        inner=4 * spec.d_model,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.heads,
        head_dim=spec.d_model // spec.heads,
        vocabulary=BYTE_VOCABULARY,
        context=spec.context,
    )


def guessed_shape(parameters: int, *, context: int | None = None) -> ModelShape:
    """Return the shape of a decoder of that many parameters in usual proportions.

    The sharded amounts are right; units and activations are guesses.
    """
    if parameters < 1:
        raise ShapeError(f"model.parameters must be at least 1; got {parameters}")
    layers = min(MAX_GUESSED_LAYERS, max(1, round((parameters / (12 * GUESSED_ASPECT**2)) ** (1 / 3))))
    width = max(1, round((parameters / (12 * layers)) ** 0.5))
    vocabulary = min(GUESSED_VOCABULARY, parameters // (8 * width))
    heads = max(1, width // 128)
    return ModelShape(
        source=f"{count_text(parameters)} parameters, the rest guessed ({layers} layers of width {width})",
        modules=tuple(_guessed_modules(parameters, vocabulary * width, layers)),
        block=Block.GATED,
        width=width,
        inner=8 * width // 3,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        vocabulary=vocabulary,
        context=context or 2048,
        is_tied=False,
        is_guess=True,
    )


def _guessed_modules(parameters: int, table: int, layers: int) -> Iterator[ModuleSize]:
    body = parameters - 2 * table
    if table:
        yield ModuleSize(name="(embedding)", parameters=(table,))
    for index in range(layers):
        numel = body // layers + (body % layers if index == 0 else 0)
        yield ModuleSize(name=f"(block {index})", parameters=(numel,))
    if table:
        yield ModuleSize(name="(head)", parameters=(table,))


def count_text(count: int) -> str:
    """Return a count in the usual form for sizes of models: 7000000000 -> 7.00 B."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
