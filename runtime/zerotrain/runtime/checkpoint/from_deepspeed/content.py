"""Conversion of the loaded dictionaries of a DeepSpeed checkpoint to streams, pieces and scalars of ours.

`contents_of` makes one `Contents` per checkpoint; `convert` writes it out. Every number is checked against
the tensors that are there, so that a wrong guess at the format is an error and never a shifted weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerotrain.runtime.checkpoint.errors import CheckpointDamaged, CheckpointMismatch
from zerotrain.runtime.checkpoint.from_deepspeed.partitions import Shapes, flat_pieces, sharded_pieces
from zerotrain.runtime.checkpoint.intervals import Piece
from zerotrain.runtime.checkpoint.manifest import TensorEntry, UnitEntry
from zerotrain.runtime.checkpoint.names import BUFFER_PREFIX
from zerotrain.runtime.checkpoint.tensorfile import dtype_name
from zerotrain.runtime.zero.state import MASTER, MOMENTUM, PARAM

KIND_OF = {"momentum_buffer": MOMENTUM}
"""Names of optimizer states of torch that differ from ours, with ours."""


@dataclass(kw_only=True)
class Contents:
    """Tensors by rank and key of its file, and their entries in the manifest."""

    files: list[dict[str, torch.Tensor]]
    units: dict[str, UnitEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def add(self, unit: str, shapes: Shapes, pieces: Mapping[str, tuple[Piece, ...]], kinds: _Kinds) -> None:
        """Store the same pieces of every kind. Raises CheckpointDamaged unless the tensors hold them."""
        stored: dict[str, str] = {}
        for kind, parts in kinds.items():
            for rank, part in enumerate(parts):
                if part is None:
                    continue
                part = part.detach()
                self.files[rank][f"{unit}/{kind}"] = part.reshape(-1)
                stored[kind] = dtype_name(part, kind)
        for fqn, shape in shapes.items():
            for piece in pieces[fqn]:
                for kind, parts in kinds.items():
                    held = parts[piece.file]
                    numel = 0 if held is None else held.numel()
                    if numel < piece.offset + piece.length:
                        raise CheckpointDamaged(
                            f"rank {piece.file}'s {kind!r} of {unit} holds {numel} elements, but "
                            f"parameter {fqn!r} needs [{piece.offset}, "
                            f"{piece.offset + piece.length}) of it"
                        )
            self.tensors[fqn] = TensorEntry(unit=unit, shape=tuple(shape), pieces=pieces[fqn])
        self.units[unit] = UnitEntry(trainable=MASTER in stored, kinds=stored)


_Kinds = Mapping[str, Sequence[torch.Tensor | None]]
"""State kind -> one flat tensor per rank."""


def contents_of(models: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> Contents:
    """Convert the dictionaries of a checkpoint, one per rank (`models`: a single one below stage 3).

    Raises CheckpointDamaged or CheckpointMismatch naming what is missing or inconsistent.
    """
    states = [_taken(one, "optimizer_state_dict", "an optimizer file") for one in optimizers]
    contents = Contents(files=[{} for _ in states])
    is_sharded = "fp32_flat_groups" in states[0]
    groups = [_shapes(group) for group in _taken(models[0], "param_shapes", "a model file") or ()]
    if not groups:
        raise CheckpointMismatch("the checkpoint has no trained parameters; there is nothing to resume")
    _check_partitions(states, world_size=len(optimizers))
    (_add_sharded if is_sharded else _add_flat)(contents, groups, states)
    _add_frozen(contents, models, is_sharded=is_sharded)
    _add_buffers(contents, models[0])
    return contents


def _add_flat(contents: Contents, groups: Sequence[Shapes], states: Sequence[Mapping[str, Any]]) -> None:
    paddings = states[0].get("param_alignment_paddings")
    for index, shapes in enumerate(groups):
        masters = [_item(state, "single_partition_of_fp32_groups", index) for state in states]
        moments = _moments([_flat_base_state(state, index) for state in states])
        kinds: _Kinds = {MASTER: masters, **moments}
        # The end padding is cut off from some of them; the longest shows how the group was divided.
        partition = max(part.numel() for parts in kinds.values() for part in parts if part is not None)
        total = sum(math.prod(shape) for shape in shapes.values())
        if total > max(partition, 1) * len(states):  # before any arithmetic over missing elements
            raise CheckpointDamaged(
                f"the parameters of group {index} come to {total} elements; its {len(states)} ranks hold "
                f"{partition} each"
            )
        pieces = flat_pieces(
            shapes, partition=max(partition, 1), paddings=paddings[index] if paddings else None
        )
        _check_ranks(pieces, len(states), index)
        contents.add(f"group-{index}", shapes, pieces, kinds)


def _add_sharded(contents: Contents, groups: Sequence[Shapes], states: Sequence[Mapping[str, Any]]) -> None:
    for index, shapes in enumerate(groups):
        masters = [_item(state, "fp32_flat_groups", index) for state in states]
        bases = [_taken(state, "optimizer_state_dict", "an optimizer file")["state"] for state in states]
        moments = _moments([base.get(index, {}) for base in bases])
        pieces, expected = sharded_pieces(shapes, world_size=len(states))
        for rank, part in enumerate(masters):
            if part.numel() != expected:
                raise CheckpointDamaged(
                    f"rank {rank} holds {part.numel()} elements of group {index}; its parameters come to "
                    f"{expected}"
                )
        contents.add(f"group-{index}", shapes, pieces, {MASTER: masters, **moments})


def _add_frozen(contents: Contents, models: Sequence[Mapping[str, Any]], *, is_sharded: bool) -> None:
    world_size = len(contents.files)
    whole = models[0].get("module") or {}
    if is_sharded:
        for fqn, shape in _shapes(models[0].get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][fqn] for model in models]
            pieces, _ = sharded_pieces({fqn: shape}, world_size=world_size)
            contents.add(f"frozen/{fqn}", {fqn: shape}, pieces, {PARAM: parts})
        return
    known = {*contents.tensors, *models[0].get("buffer_names", ()), *models[0].get("shared_params", ())}
    fragments = models[0].get("frozen_param_fragments") or {}
    for fqn, value in {**whole, **fragments}.items():
        if fqn in known or not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape)
        pieces = flat_pieces({fqn: shape}, partition=max(value.numel(), 1))
        alone: list[torch.Tensor | None] = [value, *([None] * (world_size - 1))]
        contents.add(f"frozen/{fqn}", {fqn: shape}, pieces, {PARAM: alone})


def _add_buffers(contents: Contents, model: Mapping[str, Any]) -> None:
    module = model.get("module") or {}
    for fqn in model.get("buffer_names", ()):
        if fqn in module:
            contents.files[0][f"{BUFFER_PREFIX}{fqn}"] = module[fqn].detach()


def _moments(states: Sequence[Mapping[str, Any]]) -> dict[str, list[torch.Tensor | None]]:
    """Return kind -> one tensor per rank, for the states that are as long as the partition."""
    kinds = {
        name
        for state in states
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() == 1
    }
    return {KIND_OF.get(name, name): [state.get(name) for state in states] for name in sorted(kinds)}


def _flat_base_state(state: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    base = _taken(state, "base_optimizer_state", "an optimizer file")
    if isinstance(base, list):  # DeepSpeed's elastic form: one entry per group, padding cut off
        return base[group] if group < len(base) else {}
    found: Mapping[str, Any] = base["state"].get(group, {})
    return found


def _item(state: Mapping[str, Any], key: str, index: int) -> torch.Tensor:
    values = _taken(state, key, "an optimizer file")
    if index >= len(values) or not isinstance(values[index], torch.Tensor):
        raise CheckpointDamaged(
            f"an optimizer file has {len(values)} of {key}, the model file has more groups"
        )
    tensor: torch.Tensor = values[index]
    return tensor


def _taken(values: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in values:
        raise CheckpointDamaged(f"{where} has no {key!r}: it is not one that DeepSpeed's ZeRO writes")
    return values[key]


def _shapes(group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {str(fqn): tuple(int(size) for size in shape) for fqn, shape in group.items()}
    for fqn, shape in shapes.items():
        if any(size < 0 for size in shape):
            raise CheckpointDamaged(f"parameter {fqn!r} is recorded with shape {shape}")
    return shapes


def _check_partitions(states: Sequence[Mapping[str, Any]], *, world_size: int) -> None:
    count = states[0].get("partition_count", world_size)
    counts = set(count) if isinstance(count, (list, tuple)) else {count}
    if counts != {world_size}:
        raise CheckpointDamaged(
            f"the optimizer states were cut into {sorted(counts)} parts, but {world_size} *_optim_states.pt "
            "files are there; some are missing, or experts had groups of their own"
        )


def _check_ranks(pieces: Mapping[str, tuple[Piece, ...]], world_size: int, index: int) -> None:
    last = max((piece.file for parts in pieces.values() for piece in parts), default=0)
    if last >= world_size:
        raise CheckpointDamaged(
            f"the parameters of group {index} do not fit the {world_size} partitions that are there"
        )
