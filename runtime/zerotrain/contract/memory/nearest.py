"""Needs of a configuration in host memory and disk, and the nearest configuration that fits.

The engine calls it before it allocates. It is pure arithmetic over the sizes of the model's units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from zerotrain.contract.config import BatchConfig, ConfigError, EngineConfig
from zerotrain.contract.config.batch import ACCUMULATION, MICRO, TRAIN, resolve_batch
from zerotrain.contract.config.encoding import can_split_master
from zerotrain.contract.config.groups import can_group
from zerotrain.contract.config.scaling import GlobalBatch

from .gpu import gpu_persistent, gpu_transient
from .inputs import padded_numel
from .model import memory_inputs
from .sizes import UnitSize
from .tiers import disk_bytes, host_bytes

MAX_FACTOR = 64
"""Largest multiple of the number of ranks in the search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Properties that determine the bytes beside the configuration and the model."""

    on_host: bool = False
    """Whether the accelerator is the host's own CPU, so that all data is in host memory."""
    shares_memory: bool = False
    """Whether ranks read each other's weights in place."""
    ranks_per_node: int = 0
    is_encrypted: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes of one rank. As available capacity: the bytes for one rank; None = unlimited."""

    host: int | None
    disk: int | None
    accelerator: int | None = None

    def within(self, capacity: Needs) -> bool:
        """Return whether all needs are within the available capacity."""
        pairs = (
            (self.host, capacity.host),
            (self.disk, capacity.disk),
            (self.accelerator, capacity.accelerator),
        )
        return all(need is None or there is None or need <= there for need, there in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Another setting and its needs."""

    changes: tuple[str, ...]
    """Changes as a user would write them."""
    needs: Needs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    kind: str
    text: str
    apply: Callable[[EngineConfig], EngineConfig]


def needs_of(config: EngineConfig, units: Sequence[UnitSize], hardware: Hardware) -> Needs:
    """Return the bytes that one rank of this engine allocates, at its peak and without activations."""
    inputs = memory_inputs(
        config,
        units,
        shares_memory=hardware.shares_memory,
        ranks_per_node=hardware.ranks_per_node,
        on_host=hardware.on_host,
        is_encrypted=hardware.is_encrypted,
    )
    device = gpu_persistent(inputs).total_bytes + gpu_transient(inputs).peak_bytes
    host = host_bytes(inputs).total_bytes
    if hardware.on_host:
        return Needs(host=host + device, disk=disk_bytes(inputs))
    return Needs(host=host, disk=disk_bytes(inputs), accelerator=device)


def nearest(
    config: EngineConfig, units: Sequence[UnitSize], capacity: Needs, hardware: Hardware, *, has_folder: bool
) -> Proposal | None:
    """Return the setting that fits with the fewest and mildest changes; None if no tried one fits.

    `has_folder`: a folder for a spill is known, so the proposal need not mention one.
    """
    changes = list(_changes(config, hardware, has_folder=has_folder))
    for count in (1, 2):
        for chosen in combinations(changes, count):
            if len({change.kind for change in chosen}) < count:
                continue
            changed = config
            for change in chosen:
                changed = change.apply(changed)
            if not _can_group(changed):
                continue
            needs = needs_of(changed, _padded(units, config, changed), hardware)
            if needs.within(capacity):
                return Proposal(changes=tuple(change.text for change in chosen), needs=needs)
    return None


def _can_group(config: EngineConfig) -> bool:
    size = config.zero.zero_hpz_partition_size
    return can_group(stage=config.zero.stage, world_size=config.world_size, group_size=size)


def _padded(units: Sequence[UnitSize], old: EngineConfig, new: EngineConfig) -> Sequence[UnitSize]:
    if old.world_size == new.world_size:
        return units
    return [replace(unit, padded_numel=padded_numel(unit.numel, new.world_size)) for unit in units]


def _changes(config: EngineConfig, hardware: Hardware, *, has_folder: bool) -> Iterator[_Change]:
    """Yield the changes, the mildest first."""
    zero, precision = config.zero, config.precision
    states, params = zero.offload_optimizer, zero.offload_param
    kind = config.optimizer.type if config.optimizer else None
    known = config.optimizer.params if config.optimizer else {}
    has_whole = precision.compute_dtype == "bf16" and not precision.bf16_masters
    if has_whole and not precision.store_param_remainders and can_split_master(kind, known):
        yield _Change(kind="remainders", text='"bf16": {"store_param_remainders": true}', apply=_split)
    if states is not None:
        ratios = [0.9, 0.75, 0.5, 0.25]
        moves = list(_devices("offload_optimizer", states.device, has_folder))
        if not hardware.on_host or states.device == "nvme":
            moves += _values("offload_optimizer", "ratio", ratios, below=states.ratio)
        yield from moves if states.device == "nvme" else (*moves[1:], moves[0])
    if params is not None:
        yield from _devices("offload_param", params.device, has_folder)
        if params.device == "nvme":
            yield from _values(
                "offload_param", "max_in_cpu", [10**9, 10**8, 10**7, 0], other=params.max_in_cpu
            )
    for stage in range(zero.stage + 1, 4) if config.world_size > 1 else ():
        yield _Change(
            kind="stage", text=f'"zero_optimization": {{"stage": {stage}}}', apply=_setter(stage=stage)
        )
    yield from _more_ranks(config)


def _more_ranks(config: EngineConfig) -> Iterator[_Change]:
    """Yield numbers of ranks that can share the samples in the file."""
    factor = 2
    while factor <= MAX_FACTOR:
        ranks = config.world_size * factor
        factor *= 2
        batch, edit = _shared_batch(config, ranks)
        if batch is not None:
            yield _Change(
                kind="ranks",
                text=f"{ranks} ranks, as many per worker as now{edit}",
                apply=_setter_of_ranks(ranks, batch),
            )


def _shared_batch(config: EngineConfig, ranks: int) -> tuple[BatchConfig | None, str]:
    """Return the batch of `ranks` ranks, and the edit that it needs; None if they cannot share it."""
    given = {line.path: line.value for line in config.report if line.origin in ("file", "auto")}
    train, accumulation = given.get(TRAIN), given.get(ACCUMULATION)
    try:
        batch = resolve_batch(
            train=train, micro=given.get(MICRO), accumulation=accumulation, world_size=ranks
        )
        return batch, ""
    except ConfigError:
        if train is None or accumulation is None:
            return None, ""
    # The accumulation in the file is for the present ranks. Fewer steps keep the samples and the micro-batch.
    micro = config.batch.micro_batch_size
    kept = GlobalBatch(train_batch_size=train, micro_batch_size=micro, is_micro_given=True)
    if not kept.fits(ranks):
        return None, ""
    batch = kept.at(ranks)
    return batch, f', with "{ACCUMULATION}": {batch.gradient_accumulation_steps}'


def _setter_of_ranks(ranks: int, batch: BatchConfig) -> Callable[[EngineConfig], EngineConfig]:
    return lambda given: replace(given, world_size=ranks, batch=batch)


def _split(config: EngineConfig) -> EngineConfig:
    return replace(config, precision=replace(config.precision, store_param_remainders=True))


def _devices(block: str, device: str, has_folder: bool) -> Iterator[_Change]:
    other = "cpu" if device == "nvme" else "nvme"
    more: dict[str, Any] = {"device": other}
    if block == "offload_param" and other == "nvme":
        more["max_in_cpu"] = 0
    folder = "" if has_folder or other == "cpu" else ' with "nvme_path", a folder on a local disk,'
    yield _change(block, more, folder)


def _values(
    block: str, name: str, values: Sequence[float], *, below: float | None = None, other: float | None = None
) -> Iterator[_Change]:
    for value in values:
        if value != other and (below is None or value < below):
            yield _change(block, {name: value})


def _change(block: str, values: dict[str, Any], more: str = "") -> _Change:
    def apply(config: EngineConfig) -> EngineConfig:
        found = replace(getattr(config.zero, block), **values)
        return replace(config, zero=replace(config.zero, **{block: found}))

    shown = ", ".join(
        f'"{name}": "{value}"' if isinstance(value, str) else f'"{name}": {value}'
        for name, value in values.items()
    )
    return _Change(kind=f"{block}.{min(values)}", text=f'"{block}": {{{shown}}}{more}', apply=apply)


def _setter(**values: Any) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, zero=replace(config.zero, **values))
