"""`load_weights`: record which file holds which parameter; `initialize` reads the bytes, each rank its
own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from zerotrain.runtime.construct.context import Origin, bind
from zerotrain.runtime.weights.errors import WeightsError
from zerotrain.runtime.weights.files import StoredTensor, WeightFiles
from zerotrain.runtime.zero.names import named_parameters, without_wrappers
from zerotrain.runtime.zero.plan import persistent_buffers

_NAMED = 8

_BASE_PREFIXES = ("model.", "transformer.")
"""Prefixes of Hugging Face's base models: files of `LlamaModel` load into `LlamaForCausalLM` and vice
versa."""

_DERIVED = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Buffers that older versions stored and that models now compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWeights:
    """Result of `load_weights`. `missing` and `unexpected` are empty when it was strict."""

    files: WeightFiles
    missing: tuple[str, ...]
    """Parameters and buffers without a stored tensor; they keep their values."""
    unexpected: tuple[str, ...]
    """Stored tensors that have no counterpart in the model."""


class FromFile:
    """The values of one parameter, in a file."""

    def __init__(self, files: WeightFiles, name: str) -> None:
        self._files = files
        self._name = name

    def read(self, start: int, target: torch.Tensor) -> None:
        self._files.read_into(self._name, start, target)


def load_weights(model: nn.Module, path: Path | str, *, strict: bool = True) -> LoadedWeights:
    """Make `initialize` give `model` the weights of a safetensors file or a Hugging Face folder.

    The model may be built within `init_context` or plainly. This function only reads and compares headers;
    then `initialize` reads, on each rank, the byte ranges of that rank's own part, and casts them. Tied
    parameters need one of their names in the file. Values of the constructors are not computed.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or `model.safetensors.index.json`.
        strict: raise for names that only the model or only the file has; shapes must agree in any case.

    Raises WeightsError listing names that are missing, unexpected, or of another shape or kind.
    """
    files = WeightFiles(path)
    stored = _renamed(files.tensors, model)
    buffers = persistent_buffers(model)
    origins: dict[str, Origin] = {}
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    for names, tensor in _names_of((*named_parameters(model, remove_duplicate=False), *buffers.items())):
        found = [name for name in names if name in stored]
        used.update(found)
        if not found:
            missing.append(names[0])
            continue
        key = stored[found[0]]
        for name in found:
            problems += _misfit(name, tensor, files.tensors[stored[name]])
        origins[names[0]] = FromFile(files, key)
    derived = {name for name in stored if _DERIVED.search(name)}
    unexpected = sorted(set(stored) - used - derived)
    required = [name for name in missing if name not in buffers or buffers[name].is_meta]
    if strict:
        problems += [f"missing {name!r}" for name in required if not _DERIVED.search(name)]
        problems += [f"unexpected {stored[name]!r}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise WeightsError(
            f"weights {files.path} do not fit the model: {'; '.join(problems[:_NAMED])}{more}. "
            "Take the folder that belongs to the model"
            + (", or pass strict=False to keep the model's own values for missing names" if strict else "")
        )
    bind(model, origins)
    return LoadedWeights(files=files, missing=tuple(missing), unexpected=tuple(unexpected))


def _names_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterable[tuple[list[str], torch.Tensor]]:
    """Return every distinct tensor with all its names."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in tensors:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return found.values()


def _misfit(name: str, tensor: torch.Tensor, stored: StoredTensor) -> Sequence[str]:
    if tuple(tensor.shape) != stored.shape:
        return [f"{name!r} has shape {list(stored.shape)} in the file, {list(tensor.shape)} in the model"]
    if _kind(tensor.dtype) != _kind(stored.dtype):
        return [f"{name!r} is {stored.dtype} in the file, {tensor.dtype} in the model"]
    return []


def _kind(dtype: torch.dtype) -> object:
    """Return the class of dtypes that can be cast into each other; floats of 8 bits and fewer have no meaning
    without their scales."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return dtype
    return dtype.is_floating_point, dtype.is_complex


def _renamed(tensors: Mapping[str, StoredTensor], model: nn.Module) -> dict[str, str]:
    """Return the model's names with the names in the files, which may have or lack the base model's prefix
    and the additions of wrappers."""
    known = {name for name, _ in named_parameters(model, remove_duplicate=False)}
    known |= set(persistent_buffers(model))
    found: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: name not in known):  # exact names first
        fitting = (other for other in _names_like(name) if other in known and other not in found)
        found[next(fitting, name)] = name
    return found


def _names_like(name: str) -> Iterator[str]:
    """Yield the name, without the additions of torch's wrappers, with and without the base model's prefix."""
    bare = without_wrappers(name)
    for each in dict.fromkeys((name, bare, bare.removeprefix("module."))):
        yield each
        for prefix in _BASE_PREFIXES:
            yield prefix + each
            yield each.removeprefix(prefix)
