"""The buffers of a model at the start: checked to be the same on all ranks, and given the values of rank 0.

`setup` calls `check_buffers` before anything is sharded; `take_values` calls `take_buffers`. Values are sent
as bytes of contiguous memory, which works for every dtype and for views with any strides.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.contract.config import PrecisionConfig
from zerotrain.contract.strict_json import strict_json
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.layout import LayoutError, ModelLayout
from zerotrain.runtime.zero.names import all_modules, joined
from zerotrain.runtime.zero.strided import as_bytes, converted, expanded_dims, holds, overwrite, unexpanded

_LOG = logging.getLogger("zerotrain")
_NAMED = 5
_CAST = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that `data_types.buffer_dtype` casts; complex and 8-bit ones are left as they are."""
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class _NamedBuffer:
    """Module and key under which a buffer is registered."""

    name: str
    module: nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        found = self.module._buffers[self.key]
        assert found is not None
        return found

    @property
    def is_persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set


def _places(model: nn.Module) -> list[_NamedBuffer]:
    """Return every buffer under every name, sorted by name: the order of registration may differ between
    ranks."""
    found = [
        _NamedBuffer(joined(prefix, key), module, key)
        for prefix, module in all_modules(model)
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    return sorted(found, key=lambda place: place.name)


def _distinct(places: Sequence[_NamedBuffer]) -> dict[int, list[_NamedBuffer]]:
    """Group places by tensor, in the order of their first names."""
    found: dict[int, list[_NamedBuffer]] = {}
    for place in places:
        found.setdefault(id(place.tensor), []).append(place)
    return found


# --- before anything is sharded


def check_buffers(model: nn.Module, comm: Comm) -> None:
    """Raise LayoutError, the same on every rank, if the buffers cannot be used. Collective.

    That is a buffer that cannot be sent or saved, or ranks that have buffers of different names, shapes or
    dtypes, or that share tensors between buffers in different ways.
    """
    places = _places(model)
    problem = next(filter(None, (_problem(place, comm) for place in places)), None)
    facts = [] if problem else list(_facts(places))
    rows = comm.gather_record([_digest(facts), float(problem is not None)])
    if all(row == [rows[0][0], 0.0] for row in rows):
        return
    from zerotrain.runtime.checkpoint.group import first_problem, ranks_of

    group = ranks_of(comm)
    if not any(row[1] for row in rows):
        text = group.broadcast_text(json.dumps(facts), source=0)
        theirs = strict_json(text, max_bytes=len(text.encode()))
        problem = _difference(facts, theirs, comm.rank)
    found = first_problem(group, problem)
    if found is not None:
        raise LayoutError(found.text)


def _problem(place: _NamedBuffer, comm: Comm) -> str | None:
    """Return why this buffer cannot be handled; None for nearly all."""
    buffer, name = place.tensor, place.name
    if torch.nn.parameter.is_lazy(buffer):
        return f"buffer {name!r} is lazy; run one forward pass before zerotrain.runtime.initialize"
    if not place.is_persistent and comm.world_size == 1:
        return None  # neither sent nor saved
    if buffer.layout is not torch.strided:
        return (
            f"buffer {name!r} has layout {buffer.layout}; only dense buffers can be sent to other ranks and "
            "saved: register its indices and its values as two buffers and put them together in forward"
        )
    is_wrapper: bool = is_traceable_wrapper_subclass(buffer)
    if is_wrapper:
        return (
            f"buffer {name!r} is a {type(buffer).__name__}; only plain tensors can be sent to other ranks "
            "and saved: register the tensors that it is made of"
        )
    from zerotrain.runtime.checkpoint.tensorfile import DTYPE_NAMES

    if buffer.is_quantized or (place.is_persistent and buffer.dtype not in DTYPE_NAMES):
        return (
            f"buffer {name!r} has dtype {buffer.dtype}, which a checkpoint cannot hold; register it as "
            "integers (buffer.view(torch.uint8), or int_repr() with scale and zero point) and turn them back "
            "in forward"
        )
    return None


def _facts(places: Sequence[_NamedBuffer]) -> Iterator[list[Any]]:
    """Yield what the ranks must agree on, for each buffer: name, dtype, shape, first name, whether it is
    saved."""
    first = {key: same[0].name for key, same in _distinct(places).items()}
    for place in places:
        tensor = place.tensor
        yield [place.name, str(tensor.dtype), list(tensor.shape), first[id(tensor)], place.is_persistent]


def _digest(facts: Any) -> float:
    """Return 52 bits of a hash of the facts, which float64 holds exactly."""
    return float(int(sha256(json.dumps(facts).encode()).hexdigest()[:13], 16))


def _difference(mine: Sequence[list[Any]], theirs: Sequence[list[Any]], rank: int) -> str | None:
    """Describe the first buffer in which this rank differs from rank 0; None if there is none."""
    ours, others = ({fact[0]: fact for fact in facts} for facts in (mine, theirs))
    for name in sorted({*ours, *others}):
        own, other = ours.get(name), others.get(name)
        if own == other:
            continue
        here, there = _described(own, other), _described(other, own)
        return (
            f"buffer {name!r} differs between ranks: {there} on rank 0, {here} on rank {rank}; build the "
            "model from the same configuration on every rank"
        )
    return None


def _described(fact: list[Any] | None, other: list[Any] | None) -> str:
    if fact is None:
        return "absent"
    _, dtype, shape, first, is_persistent = fact
    text = f"{dtype} of shape {shape}"
    if other is not None and other[1:3] == fact[1:3]:
        text += f", {'' if is_persistent else 'not '}persistent"
        text += ", a tensor of its own" if first == fact[0] else f", the same tensor as {first!r}"
    return text


# --- values


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRules:
    """Rules for the dtypes of buffers."""

    layout: ModelLayout
    precision: PrecisionConfig

    def dtype_of(self, place: _NamedBuffer) -> torch.dtype | None:
        """Return the dtype to cast to; None = no cast."""
        tensor = place.tensor
        if tensor.dtype not in _CAST or tensor.layout is not torch.strided:
            return None
        wanted = self._of_weights(place)
        if wanted is None and self.precision.buffer_dtype is not None:
            wanted = TORCH_DTYPES[self.precision.buffer_dtype]
        return wanted

    def keeps(self, name: str) -> bool:
        """Return whether `data_types.keep_in_fp32_modules` names the buffer, by a part of its name or by a
        pattern."""
        return any(
            pattern in name or fnmatchcase(name, pattern) for pattern in self.precision.keep_in_fp32_modules
        )

    def _of_weights(self, place: _NamedBuffer) -> torch.dtype | None:
        """Return the dtype of the weights for running statistics of BatchNorm; None for other buffers.

        torch's BatchNorm accepts running statistics only in the dtype of its weights (InstanceNorm accepts
        any). A subclass with its own forward defines itself which dtypes it mixes.
        """
        module = place.module
        if place.key not in _STATISTICS or not isinstance(module, _BatchNorm) or not module.affine:
            return None
        if not type(module).forward.__module__.startswith("torch."):
            return None
        try:
            unit, _ = self.layout.find(f"{place.name.removesuffix(place.key)}weight")
        except LayoutError:  # the weight is computed by a parametrization
            return TORCH_DTYPES[self.precision.compute_dtype]
        return TORCH_DTYPES[unit.dtype]


def take_buffers(model: nn.Module, comm: Comm, rules: BufferRules) -> dict[str, torch.dtype]:
    """Cast every buffer and give it rank 0's values. Collective. The buffers are on this rank's device.

    Returns the original dtypes of the buffers that were cast, by each name. Tensors stay the same objects,
    except where one is expanded here and rank 0's values differ within it.
    """
    given = _cast(model, rules, comm)
    if comm.world_size > 1:
        tensors = list(_distinct(_places(model)).values())
        dims = [expanded_dims(same[0].tensor) for same in tensors]
        rows = comm.gather_record([_digest(dims)])
        for same in tensors:
            _from_rank_0(same, comm, is_whole=any(row != rows[0] for row in rows))
    return given


@torch.no_grad()
def _cast(model: nn.Module, rules: BufferRules, comm: Comm) -> dict[str, torch.dtype]:
    given: dict[str, torch.dtype] = {}
    cast: dict[str, list[str]] = {}
    for same in _distinct(_places(model)).values():
        tensor = same[0].tensor
        dtype = next(filter(None, map(rules.dtype_of, same)), None)
        if dtype is None or dtype == tensor.dtype or any(rules.keeps(place.name) for place in same):
            continue
        given.update((place.name, tensor.dtype) for place in same)
        cast.setdefault(str(dtype).removeprefix("torch."), []).extend(place.name for place in same)
        tensor.data = converted(tensor, dtype, tensor.device)
    if comm.rank == 0:
        for name, buffers in cast.items():
            _LOG.warning(
                "buffers cast to %s: %s (running statistics follow their weights, others "
                "data_types.buffer_dtype; data_types.keep_in_fp32_modules exempts)",
                name,
                ", ".join(buffers),
            )
    return given


def _from_rank_0(same: Sequence[_NamedBuffer], comm: Comm, *, is_whole: bool) -> None:
    """Give one tensor rank 0's values; with `is_whole` the repetitions of `expand` are sent too."""
    buffer = same[0].tensor
    part = buffer if is_whole else unexpanded(buffer)
    if part.numel() == 0:
        return
    sent = as_bytes(part)
    comm.broadcast(sent, label=same[0].name)
    if comm.rank == 0 or sent.data_ptr() == buffer.data_ptr():
        return
    values = sent.view(part.dtype).view(part.shape)
    if holds(part, values):
        overwrite(part, values)
        return
    for place in same:
        place.module._buffers[place.key] = values


def kept_buffers(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of floating buffers in another dtype than `dtype`, by first name."""
    tensors = [same[0] for same in _distinct(_places(model)).values()]
    return {
        place.name: place.tensor.dtype
        for place in tensors
        if place.tensor.dtype in _CAST and place.tensor.dtype != dtype
    }
