"""Check whether what is offloaded will fit the host's memory and disk; `setup` calls it before it allocates.

An engine that does not fit would otherwise be killed without a message in the middle of its start, or fill a
disk. All ranks of a host share the same memory and disk, so every rank sends its needs to all, and all of
them come to the same answer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.memory import UnitSize
from zerotrain.contract.memory.nearest import Hardware, Needs, Proposal, nearest, needs_of
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.offload.free_memory import disk_free, free_memory
from zerotrain.runtime.offload.spill import SpillSettings, possible_spill, spill_settings
from zerotrain.runtime.zero.layout import DTYPE_BYTES, ModelLayout

GIB = 1 << 30
_NO_LIMIT = -1.0
_NO_FOLDER = -2.0


class DoesNotFit(RuntimeError):
    """Error of a model that does not fit the host memory or the disk; the text has the numbers and what would
    fit."""

    exit_code: ExitCode = ExitCode.DOES_NOT_FIT


@dataclass(frozen=True, slots=True)
class _Row:
    """Bytes that one rank needs, and bytes that it finds available."""

    host: float
    disk: float
    memory_limit: float
    memory_used: float
    """Bytes in use by all ranks of the host and by other processes."""
    taken_over: float
    """The part of `memory_used` that this rank's engine takes over from the model."""
    disk_limit: float
    """Limit of this rank's spill, or _NO_LIMIT."""
    disk_free: float
    """Free bytes of the whole disk; _NO_LIMIT without a known folder, _NO_FOLDER for an unusable folder."""
    accelerator_free: float
    """Free bytes of this rank's own accelerator, or _NO_LIMIT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """The ranks of one host together."""

    first_rank: int
    rows: Sequence[_Row]

    @property
    def memory_free(self) -> float:
        taken_over = sum(row.taken_over for row in self.rows)
        return min(row.memory_limit - row.memory_used for row in self.rows) + taken_over

    @property
    def available_per_rank(self) -> Needs:
        """Bytes that are available to one rank."""
        ranks = len(self.rows)
        disks = [row.disk_limit for row in self.rows] + [row.disk_free / ranks for row in self.rows]
        accelerators = [row.accelerator_free for row in self.rows]
        return Needs(
            host=max(0, int(self.memory_free / ranks)), disk=_least(disks), accelerator=_least(accelerators)
        )

    @property
    def lacks_memory(self) -> bool:
        return sum(row.host for row in self.rows) > self.memory_free

    @property
    def lacks_disk(self) -> bool:
        if all(row.disk == 0 for row in self.rows):
            return False
        over = any(row.disk_limit != _NO_LIMIT and row.disk > row.disk_limit for row in self.rows)
        return over or sum(row.disk for row in self.rows) > min(row.disk_free for row in self.rows)


def _least(bounds: Sequence[float]) -> int | None:
    return min((int(bound) for bound in bounds if bound >= 0), default=None)


def unit_sizes(layout: ModelLayout) -> list[UnitSize]:
    """Return a layout's units in the form that the byte formulas take."""
    return [
        UnitSize(
            name=unit.name,
            numel=unit.numel,
            padded_numel=unit.padded_numel,
            trainable=unit.trainable,
            whole_pass=not unit.module,
            stays_whole=unit.stays_whole,
            matrix_numel=sum(part.numel for part in unit.segments if len(part.shape) == 2),
            element_bytes=None if unit.trainable else DTYPE_BYTES[unit.dtype],
        )
        for unit in layout.units
    ]


def check_fit(model: nn.Module, config: EngineConfig, layout: ModelLayout, comm: Comm) -> None:
    """Raise DoesNotFit, the same on every rank, when a host lacks memory or disk for its ranks. Collective.

    Does nothing where nothing is offloaded. Raises ConfigError for a spill without a folder to write in.
    """
    if config.zero.offload_optimizer is None and config.zero.offload_param is None:
        return
    spill = spill_settings(config, os.environ, world_size=comm.world_size)
    place = spill or possible_spill(config, os.environ, world_size=comm.world_size)
    hardware = Hardware(
        on_host=comm.device.type == "cpu",
        shares_memory=comm.shares_memory,
        ranks_per_node=comm.nodes.ranks_per_node,
        is_encrypted=place.encryption == "AEAD",
    )
    units = unit_sizes(layout)
    needs = needs_of(config, units, hardware)
    rows = [_Row(*row) for row in comm.gather_record(astuple(_local_row(model, needs, place)))]
    _check_folders(rows, spill)
    per_host = comm.nodes.ranks_per_node
    hosts = [
        _Host(first_rank=rank, rows=rows[rank : rank + per_host]) for rank in range(0, len(rows), per_host)
    ]
    short = [host for host in hosts if host.lacks_memory or host.lacks_disk]
    if not short:
        return
    found = nearest(config, units, _tightest(hosts), hardware, has_folder=bool(place.folders))
    raise DoesNotFit(_shortage_message(short[0], found))


def _tightest(hosts: Sequence[_Host]) -> Needs:
    """Return the least that is available to one rank of any host, for each resource."""
    available = [host.available_per_rank for host in hosts]
    return Needs(
        host=_least([each.host for each in available if each.host is not None]),
        disk=_least([each.disk for each in available if each.disk is not None]),
        accelerator=_least([each.accelerator for each in available if each.accelerator is not None]),
    )


def _local_row(model: nn.Module, needs: Needs, place: SpillSettings) -> _Row:
    memory = free_memory()
    free = disk_free(place.folders) if place.folders else _NO_LIMIT
    on_cuda = needs.accelerator is not None and torch.cuda.is_available()
    return _Row(
        host=float(needs.host or 0),
        disk=float(needs.disk or 0),
        memory_limit=float(memory.limit),
        memory_used=float(memory.used),
        taken_over=float(_taken_over(model)),
        disk_limit=_NO_LIMIT if place.limit_bytes is None else float(place.limit_bytes),
        disk_free=_NO_FOLDER if free is None else float(free),
        accelerator_free=float(torch.cuda.mem_get_info()[0]) if on_cuda else _NO_LIMIT,
    )


def _taken_over(model: nn.Module) -> int:
    """Return the bytes of host memory of the model's own parameters, which become the engine's."""
    held = [each for each in model.parameters() if not (each.is_meta or is_pending(each))]
    tensors = {parameter.data_ptr(): parameter.nbytes for parameter in held}
    return sum(tensors.values()) if all(each.device.type == "cpu" for each in held) else 0


def _check_folders(rows: Sequence[_Row], spill: SpillSettings | None) -> None:
    failing_ranks = [rank for rank, row in enumerate(rows) if row.disk_free == _NO_FOLDER]
    if failing_ranks and spill is not None:
        raise ConfigError(
            spill.folders_from,
            f"must be a folder that every rank can create and write to; rank {failing_ranks[0]} cannot",
            ", ".join(map(str, spill.folders)),
            "Create it on every worker, or give the job spec.nvme.",
        )


def _shortage_message(host: _Host, found: Proposal | None) -> str:
    ranks = len(host.rows)
    last = host.first_rank + ranks - 1
    who = f"ranks {host.first_rank} to {last}" if ranks > 1 else f"rank {host.first_rank}"
    lines = []
    if host.lacks_memory:
        need, row = sum(row.host for row in host.rows), min(host.rows, key=lambda row: row.memory_limit)
        lines.append(
            f"{who} of one host need {_gib(need)} of host memory together ({_gib(need / ranks)} each), "
            f"activations aside, and {_gib(host.memory_free)} of {_gib(row.memory_limit)} are free there"
        )
    if host.lacks_disk:
        need = sum(row.disk for row in host.rows)
        limits = {row.disk_limit for row in host.rows if row.disk_limit != _NO_LIMIT}
        bound = f", {_gib(min(limits))} are allowed each" if limits else ""
        lines.append(
            f"{who} of one host spill {_gib(need)} together ({_gib(need / ranks)} each){bound}; "
            f"{_gib(min(row.disk_free for row in host.rows))} are free on the disk"
        )
    return f"{'; '.join(lines)}. {_advice(found)}"


def _advice(found: Proposal | None) -> str:
    if found is None:
        return "No setting nearby fits: give each worker more memory or disk, or take a smaller model."
    needs = f"{_gib(found.needs.host or 0)} of memory and {_gib(found.needs.disk or 0)} of disk per rank"
    return f"Nearest that fits: {' and '.join(found.changes)} ({needs})."


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / (1 << 20):.1f} MiB"
