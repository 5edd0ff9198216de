"""The nearest configuration that fits: the mildest combination of changes, by a fixed price list.

Searched by price, cheapest first, so that the first that fits is the nearest. Bounded by the size of
the model: the operator asks on its event loop. The engine's own check at the start of a job
(`memory/nearest.py`) looks at fewer changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.encoding import can_offload, can_split_master
from zerotrain.contract.config.schema import OffloadConfig

from .demand import Demand, Verdict, Workload, demand

MAX_EVALUATIONS = 400
MAX_MODULES = 20_000
"""Modules in all configurations that are looked at, which is what a search costs: of a model of 96 layers 200
configurations, of one of 1,024 layers 19."""
MAX_WORKER_FACTOR = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A configuration that fits."""

    changes: tuple[str, ...]
    """As a user would write them."""
    demand: Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One edit and what it costs; prices rank them and mean nothing else."""

    kind: str
    """Of several changes of one kind a proposal has one."""
    price: float
    text: str
    apply: Callable[[EngineConfig], EngineConfig]


def nearest(workload: Workload, *, has_volume: bool = True, may_grow: bool = True) -> Proposal | None:
    """The mildest change after which everything fits; None where none of those looked at does.

    `has_volume`: workers have one for spilled state. `may_grow`: more workers may be proposed.
    """
    kinds = _by_kind(_changes(workload, has_volume=has_volume, may_grow=may_grow))
    queue: list[tuple[float, int, tuple[Change, ...], int]] = [(0.0, 0, (), 0)]
    pushed = looked_at = 0
    most = min(MAX_EVALUATIONS, max(1, MAX_MODULES // max(1, len(workload.shape.modules))))
    while queue and looked_at < most:
        _, _, chosen, first = heapq.heappop(queue)
        if chosen:
            looked_at += 1
            found = _evaluate(workload, chosen)
            if found is not None and _fits(found):
                return Proposal(changes=tuple(change.text for change in chosen), demand=found)
        for index in range(first, len(kinds)):
            for change in kinds[index]:
                pushed += 1
                price = sum(item.price for item in chosen) + change.price
                heapq.heappush(queue, (price, pushed, (*chosen, change), index + 1))
    return None


def _fits(found: Demand) -> bool:
    """Limits that nobody knows are no hindrance."""
    return found.verdict in (Verdict.FITS, Verdict.UNKNOWN)


def _evaluate(workload: Workload, chosen: Sequence[Change]) -> Demand | None:
    config = workload.config
    for change in chosen:
        config = change.apply(config)
    if config.zero.offload_param is not None and config.zero.stage < 3:
        return None
    return demand(replace(workload, config=config))


def _by_kind(changes: Iterator[Change]) -> list[list[Change]]:
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(change.kind, []).append(change)
    return list(kinds.values())


def _changes(workload: Workload, *, has_volume: bool, may_grow: bool) -> Iterator[Change]:
    """In the order in which their effects build on each other."""
    config = workload.config
    yield from _stages(config)
    yield from _remainders(config)
    if config.zero.stage == 3 or config.world_size > 1:
        yield from _live(config)
    if not config.activation_checkpointing.configured:
        yield _change("recompute", 2.0, '"activation_checkpointing": {}', _recompute)
    yield from _micro_batches(config)
    yield from _offloads(workload, has_volume=has_volume)
    if may_grow:
        yield from _workers(workload)


def _change(kind: str, price: float, text: str, apply: Callable[[EngineConfig], EngineConfig]) -> Change:
    return Change(kind=kind, price=price, text=text, apply=apply)


def _stages(config: EngineConfig) -> Iterator[Change]:
    if config.world_size == 1:
        return
    for stage in range(config.zero.stage + 1, 4):
        price = 0.5 * (stage - config.zero.stage) + (1.0 if stage == 3 else 0.0)
        # The engine overlaps at stage 3 unless told otherwise.
        values = {"stage": stage, "overlap_comm": config.zero.overlap_comm or stage == 3}
        yield _change("stage", price, f'"zero_optimization": {{"stage": {stage}}}', _zero(**values))


def _remainders(config: EngineConfig) -> Iterator[Change]:
    optimizer, precision = config.optimizer, config.precision
    kind, known = (optimizer.type, optimizer.params) if optimizer is not None else (None, {})
    is_whole = precision.compute_dtype == "bf16" and not precision.store_param_remainders
    if is_whole and can_split_master(kind, known):
        yield _change("remainders", 0.7, '"bf16": {"store_param_remainders": true}', _split)


def _live(config: EngineConfig) -> Iterator[Change]:
    if config.zero.max_reuse_distance == 0:
        return
    text = '"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0'
    yield _change("live", 1.5, text, _zero(max_reuse_distance=0, prefetch_bucket_size=0))


def _micro_batches(config: EngineConfig) -> Iterator[Change]:
    """Smaller micro-batches and more of them: the batch stays what it is."""
    batch, factor = config.batch, 2
    while batch.micro_batch_size % factor == 0:
        micro, steps = batch.micro_batch_size // factor, batch.gradient_accumulation_steps * factor
        text = f'"train_micro_batch_size_per_gpu": {micro}, "gradient_accumulation_steps": {steps}'
        changed = replace(batch, micro_batch_size=micro, gradient_accumulation_steps=steps)
        yield _change("micro", 0.8 * (factor.bit_length() - 1), text, _batch(changed))
        factor *= 2


def _offloads(workload: Workload, *, has_volume: bool) -> Iterator[Change]:
    config = workload.config
    kind = config.optimizer.type if config.optimizer is not None else None
    if not can_offload(kind):
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
                continue  # it is there already
            values: dict[str, Any] = {"device": device}
            if name == "offload_param" and device == "nvme":
                values["max_in_cpu"] = 0
            text = ", ".join(f'"{key}": {_json(value)}' for key, value in values.items())
            needs = volume if device == "nvme" else ""
            yield _change(name, price + more, f'"{name}": {{{text}}}{needs}', _offload(name, values))


def _workers(workload: Workload) -> Iterator[Change]:
    ranks, workers, factor = workload.config.world_size, workload.workers, 2
    while factor <= MAX_WORKER_FACTOR:
        text = f"spec.workers: {workers * factor}"
        price = 4.5 + 1.5 * (factor.bit_length() - 1)
        yield _change("workers", price, text, _ranks(ranks * factor))
        factor *= 2


def _recompute(config: EngineConfig) -> EngineConfig:
    block = replace(config.activation_checkpointing, configured=True)
    return replace(config, activation_checkpointing=block)


def _split(config: EngineConfig) -> EngineConfig:
    return replace(config, precision=replace(config.precision, store_param_remainders=True))


def _zero(**values: Any) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, zero=replace(config.zero, **values))


def _batch(batch: Any) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, batch=batch)


def _ranks(world_size: int) -> Callable[[EngineConfig], EngineConfig]:
    return lambda config: replace(config, world_size=world_size)


def _offload(name: str, values: dict[str, Any]) -> Callable[[EngineConfig], EngineConfig]:
    def apply(config: EngineConfig) -> EngineConfig:
        block = replace(getattr(config.zero, name) or OffloadConfig(device=values["device"]), **values)
        moved: dict[str, Any] = {name: block}
        changed = replace(config, zero=replace(config.zero, **moved))
        kind, known = (
            (config.optimizer.type, config.optimizer.params) if config.optimizer is not None else (None, {})
        )
        splits = config.precision.compute_dtype == "bf16" and can_split_master(kind, known)
        # States that leave the accelerator keep the lower halves of masters alone, unless told otherwise.
        return _split(changed) if splits and name == "offload_optimizer" else changed

    return apply


def _json(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
