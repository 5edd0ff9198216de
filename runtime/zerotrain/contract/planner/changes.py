"""The changes that are tried if a job does not fit: name, cost and edit of each.

A change has two forms that must agree. `edits` is the change as a user would write it into the file. `apply`
is its effect on the configuration, so that hundreds of combinations can be compared without reading a file
each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.batch import ACCUMULATION, MICRO
from zerotrain.contract.config.encoding import REMAINDERS, can_offload, can_split_master, highest_stage
from zerotrain.contract.config.schema import OffloadConfig

from .demand import Workload
from .terms import Edits, Terms

MAX_WORKER_FACTOR = 16
Z = "zero_optimization"


def _same(config: EngineConfig) -> EngineConfig:
    return config


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """One edit and its price. Prices only rank changes and have no other meaning."""

    kind: str
    """Kind of the change. A proposal has at most one change of each kind."""
    price: float
    text: str
    edits: Edits = field(default_factory=dict)
    apply: Callable[[EngineConfig], EngineConfig] = _same
    """Whole effect except for the batch, which follows from all changes together."""


def changes(workload: Workload, terms: Terms) -> Iterator[Change]:
    """Yield the changes in the order in which their effects build on each other."""
    config = workload.config
    yield from _stages(config)
    yield from _remainders(config)
    if config.zero.stage == 3 or config.world_size > 1:
        yield from _live(config)
    if not config.activation_checkpointing.configured:
        yield Change(
            kind="recompute",
            price=2.0,
            text='"activation_checkpointing": {}',
            edits={"activation_checkpointing": {}},
            apply=_recompute,
        )
    yield from _micro_batches(config, terms)
    yield from _offloads(workload, has_volume=terms.has_volume)
    yield from _workers(workload, terms.most_workers)


def _stages(config: EngineConfig) -> Iterator[Change]:
    if config.world_size == 1:
        return
    # The engine overlaps at stage 3 unless told otherwise.
    may_overlap = not _is_written(config, f"{Z}.overlap_comm")
    for stage in range(config.zero.stage + 1, highest_stage(_optimizer(config)[0]) + 1):
        price = 0.5 * (stage - config.zero.stage) + (1.0 if stage == 3 else 0.0)
        overlaps = config.zero.overlap_comm or (stage == 3 and may_overlap)
        yield Change(
            kind="stage",
            price=price,
            text=f'"{Z}": {{"stage": {stage}}}',
            edits={f"{Z}.stage": stage},
            apply=_zero(stage=stage, overlap_comm=overlaps),
        )


def _remainders(config: EngineConfig) -> Iterator[Change]:
    precision = config.precision
    is_whole = precision.compute_dtype == "bf16" and not precision.store_param_remainders
    if is_whole and not precision.bf16_masters and can_split_master(*_optimizer(config)):
        text = '"bf16": {"store_param_remainders": true}'
        yield Change(kind="remainders", price=0.7, text=text, edits={REMAINDERS: True}, apply=_split)


def _live(config: EngineConfig) -> Iterator[Change]:
    if config.zero.max_reuse_distance == 0:
        return
    yield Change(
        kind="live",
        price=1.5,
        text='"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0',
        edits={f"{Z}.max_reuse_distance": 0, f"{Z}.prefetch_bucket_size": 0},
        apply=_zero(max_reuse_distance=0, prefetch_bucket_size=0),
    )


def _micro_batches(config: EngineConfig, terms: Terms) -> Iterator[Change]:
    """Yield smaller micro-batches with more accumulation, which keep the batch."""
    batch, factor = terms.batch(terms.base_ranks or config.world_size, {}), 2
    # If the file sets the batch but not the steps, the steps follow from the batch, for any number of ranks.
    follows = terms.train_batch_size is not None and terms.gradient_accumulation_steps is None
    while batch.micro_batch_size % factor == 0:
        edits = {MICRO: batch.micro_batch_size // factor}
        if not follows:
            edits[ACCUMULATION] = batch.gradient_accumulation_steps * factor
        yield Change(kind="micro", price=0.8 * (factor.bit_length() - 1), text=_inside(edits), edits=edits)
        factor *= 2


def _offloads(workload: Workload, *, has_volume: bool) -> Iterator[Change]:
    config = workload.config
    if not can_offload(_optimizer(config)[0]):
        return
    volume = "" if has_volume else " with spec.nvme"
    blocks = (
        ("offload_optimizer", config.zero.offload_optimizer, 4.0),
        ("offload_param", config.zero.offload_param, 5.0),
    )
    for name, block, price in blocks:
        if name == "offload_param" and config.world_size == 1 and workload.on_host:
            continue
        for device, more in (("cpu", 0.0), ("nvme", 2.0)):
            if block is not None and block.device == device:
                continue
            if device == "cpu" and workload.on_host:
                continue  # it is on the host already
            values: dict[str, Any] = {"device": device}
            if name == "offload_param" and device == "nvme":
                values["max_in_cpu"] = 0
            yield Change(
                kind=name,
                price=price + more,
                text=f'"{name}": {{{_inside(values)}}}{volume if device == "nvme" else ""}',
                edits={f"{Z}.{name}.{key}": value for key, value in values.items()},
                apply=_offload(name, values),
            )


def _workers(workload: Workload, most: int) -> Iterator[Change]:
    ranks, workers, factor = workload.config.world_size, workload.workers, 2
    while factor <= MAX_WORKER_FACTOR and workers * factor <= most:
        price = 4.5 + 1.5 * (factor.bit_length() - 1)
        text = f"spec.workers: {workers * factor}"
        yield Change(kind="workers", price=price, text=text, apply=_ranks(ranks * factor))
        factor *= 2


def _recompute(config: EngineConfig) -> EngineConfig:
    block = replace(config.activation_checkpointing, configured=True)
    return replace(config, activation_checkpointing=block)


def _split(config: EngineConfig) -> EngineConfig:
    return replace(config, precision=replace(config.precision, store_param_remainders=True))


def _zero(**values: Any) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, zero=replace(config.zero, **values))


def _ranks(world_size: int) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, world_size=world_size)


def _offload(name: str, values: dict[str, Any]) -> Callable[[EngineConfig], EngineConfig]:
    def apply(config: EngineConfig) -> EngineConfig:
        block = replace(getattr(config.zero, name) or OffloadConfig(device=values["device"]), **values)
        moved: dict[str, Any] = {name: block}
        changed = replace(config, zero=replace(config.zero, **moved))
        splits = config.precision.compute_dtype == "bf16" and can_split_master(*_optimizer(config))
        if name != "offload_optimizer" or not splits or _is_written(config, REMAINDERS):
            return changed
        # Offloaded states keep only the lower halves of masters, unless told otherwise.
        return _split(changed)

    return apply


def _optimizer(config: EngineConfig) -> tuple[str | None, Mapping[str, Any]]:
    """Return the optimizer's type and parameters; None stands for the engine's own optimizer."""
    return (config.optimizer.type, config.optimizer.params) if config.optimizer is not None else (None, {})


def _is_written(config: EngineConfig, path: str) -> bool:
    """Return whether the file decides the key, so that no value is derived for it."""
    return any(line.path == path and line.origin in ("file", "auto") for line in config.report)


def _inside(values: Mapping[str, Any]) -> str:
    """Return the text between the braces of a JSON object."""
    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in values.items())
