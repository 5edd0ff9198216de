"""Export of a running engine: every rank writes the intervals that it owns; nothing is gathered.

Called by `engine.save_16bit_model`. Memory: one window of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.checkpoint.group import RankGroup
from zerotrain.runtime.checkpoint.outcome import Outcome, agree
from zerotrain.runtime.models.huggingface import folder_of
from zerotrain.runtime.weights.companions import companions_of
from zerotrain.runtime.weights.folder import WeightFolder
from zerotrain.runtime.weights.plan import ExportTensor
from zerotrain.runtime.zero.dtypes import TORCH_DTYPES
from zerotrain.runtime.zero.extra import exportable_extra_states
from zerotrain.runtime.zero.layout import ModelLayout, UnitLayout
from zerotrain.runtime.zero.names import all_modules, innermost
from zerotrain.runtime.zero.plan import persistent_buffers
from zerotrain.runtime.zero.state import StateStream, windows
from zerotrain.runtime.zero.strided import flat


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Options of an export."""

    dtype: torch.dtype
    """Stored dtype of floating-point parameters; buffers and integers keep theirs."""
    keeps_frozen: bool = False
    """Whether frozen parameters keep their dtype, too."""
    max_bytes: int
    """Largest size of one file's tensors."""
    single: str = "model.safetensors"
    exclude_frozen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Access to an engine's values for the time of an export."""

    module: nn.Module
    layout: ModelLayout
    rank: int
    stream_of: Callable[[UnitLayout], StateStream]
    """Returns this rank's interval of a unit, in compute precision or better."""


def export(source: Source, directory: Path, options: ExportOptions, group: RankGroup) -> None:
    """Write `directory` so that transformers loads it. Collective; raises the same CheckpointError on all
    ranks."""
    prefix, folder = _origin(source.module)
    units = [unit for unit in source.layout.units if unit.trainable or not options.exclude_frozen]
    buffers, tied = _distinct(persistent_buffers(source.module) | exportable_extra_states(source.module))
    tensors = [*_parameters(units, options, prefix), *_buffers(buffers, prefix)]
    ties = {**source.layout.aliases, **tied}
    aliases = {_short(alias, prefix): _short(owner, prefix) for alias, owner in ties.items()}
    target = WeightFolder(
        directory, tensors, max_bytes=options.max_bytes, aliases=aliases, single=options.single
    )
    is_first = group.rank == 0

    def fill() -> None:
        for unit in units:
            stream, low = source.stream_of(unit), source.layout.shard_range(unit, source.rank)[0]
            for segment, start, stop in source.layout.owned_segments(unit, source.rank):
                name = _short(segment.fqn, prefix)
                for first, last in windows(stop - start):
                    values = stream.read(start - low + first, start - low + last)
                    target.write(name, start - segment.start + first, values)
        for name, buffer in buffers.items() if is_first else ():
            target.write(_short(name, prefix), 0, flat(buffer))
        target.sync()

    def finish() -> None:
        target.commit(companions_of(folder, _own_config(source.module), options.dtype))

    try:
        for action in (target.create if is_first else None, fill, finish if is_first else None):
            outcome = Outcome() if action is None else Outcome.of(action, directory)
            outcome.bytes_needed = target.total_bytes if is_first else 0
            agree(group, directory, outcome)
    except BaseException:
        target.close()
        if is_first:
            target.discard()
        raise


def _origin(module: nn.Module) -> tuple[str, Path | None]:
    """Return the name of the submodule that came from a folder ("" = the module itself), and the folder."""
    for name, part in all_modules(module):
        folder = folder_of(part)
        if folder is not None:
            return name, folder
    return "", None


def _own_config(module: nn.Module) -> Mapping[str, Any] | None:
    """Return the configuration that a transformers model carries."""
    module = innermost(module)  # config.json names its class
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    if not callable(to_dict) or not hasattr(module, "save_pretrained"):
        return None
    config: dict[str, Any] = {**to_dict(), "architectures": [type(module).__name__]}
    return config


def _parameters(units: list[UnitLayout], options: ExportOptions, prefix: str) -> Iterator[ExportTensor]:
    for unit in units:
        own = TORCH_DTYPES[unit.dtype]
        is_kept = options.keeps_frozen and not unit.trainable
        stored = options.dtype if own.is_floating_point and not is_kept else own
        for segment in unit.segments:
            yield ExportTensor(name=_short(segment.fqn, prefix), shape=segment.shape, dtype=stored)


def _buffers(buffers: Mapping[str, torch.Tensor], prefix: str) -> Iterator[ExportTensor]:
    for name, buffer in buffers.items():
        yield ExportTensor(name=_short(name, prefix), shape=tuple(buffer.shape), dtype=buffer.dtype)


def _distinct(buffers: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return every buffer by its first name, and the first name of each further name."""
    owners: dict[int, str] = {}
    for name, buffer in buffers.items():
        owners.setdefault(id(buffer), name)
    stored = {name: buffer for name, buffer in buffers.items() if owners[id(buffer)] == name}
    return stored, {name: owners[id(each)] for name, each in buffers.items() if name not in stored}


def _short(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name
