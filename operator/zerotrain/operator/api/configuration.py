"""Configuration of a job, resolved at its own size or at another: the sizes that work, and the files that the
workers get.

Called by admission, by reconcile when it decides on a size, and by resources when they render the files of an
attempt.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from zerotrain.contract.config import AutoValues, ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.scaling import GlobalBatch, global_batch, with_batch
from zerotrain.contract.presets import auto_values
from zerotrain.contract.strict_json import own_json

from .job import ZeroTrainingJob
from .spec import ZeroTrainingJobSpec

MAX_OUTCOMES = 256


class Outcomes:
    """Cache of the newest resolved configurations, errors included, shared by all threads: a job that waits
    or is refused asks again in every pass."""

    def __init__(self, most: int = MAX_OUTCOMES) -> None:
        self._most = most
        self._known: dict[tuple[bytes, Hashable], EngineConfig | ConfigError] = {}
        self._change = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, config: str, terms: Hashable, resolve: Callable[[], EngineConfig]) -> EngineConfig:
        """Return what `resolve` returned for this configuration under these terms, or raise what it raised.
        Raises ConfigError."""
        key = (hashlib.sha256(config.encode(errors="surrogatepass")).digest(), terms)
        found = self._known.get(key)
        if found is None:
            try:
                found = resolve()
            except ConfigError as error:
                found = error
            with self._change:
                while len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]
                self._known[key] = found
        if isinstance(found, ConfigError):
            # Drop the frames of earlier callers, which each raise would add to.
            raise found.with_traceback(None)
        return found


_outcomes = Outcomes()
"""Configurations at the size that the job asks for."""

_outcomes_at = Outcomes()
"""Configurations at other sizes."""


def auto_of(spec: ZeroTrainingJobSpec) -> AutoValues:
    """Return the job's values for "auto"."""
    gpt = spec.model.gpt if spec.model is not None else None
    preset = spec.model.preset if spec.model is not None else None
    values = auto_values(d_model=gpt.d_model if gpt else None, preset=preset, steps=spec.steps)
    asked = spec.finetune
    if asked is None:
        return values
    return replace(
        values,
        micro_batch_size=asked.batch_size,
        gradient_accumulation_steps=asked.accumulation_steps,
        learning_rate=asked.learning_rate,
    )


def engine_config(spec: ZeroTrainingJobSpec, *, world_size: int | None = None) -> EngineConfig | None:
    """Return the inline configuration, resolved for the job's world size unless another is given; None with
    configFrom, which only the workers read. Raises ConfigError."""
    if spec.config is None:
        return None
    auto = auto_of(spec)
    # Use the text as key, since True, 1 and 1.0 are one key but not one value.
    text, ranks = json.dumps(spec.config, sort_keys=True), world_size or spec.world_size
    return _outcomes.of(
        text, (ranks, auto), lambda: resolve(load(own_json(text)), world_size=ranks, auto=auto)
    )


def base_workers(job: ZeroTrainingJob) -> int:
    """Return the size whose global batch the job keeps."""
    elastic = job.status.elastic
    return elastic.base_workers if elastic is not None else job.shape.workers


def batch_of(spec: ZeroTrainingJobSpec, base: int) -> GlobalBatch:
    """Return the global batch, which a resize keeps. Raises ConfigError; the spec must have its configuration
    inline."""
    return global_batch(spec.config or {}, world_size=base * spec.num_ranks_per_worker, auto=auto_of(spec))


def config_at(spec: ZeroTrainingJobSpec, base: int, workers: int) -> dict[str, Any]:
    """Return the inline configuration for the number of workers. Raises ConfigError if the batch does not
    divide."""
    each = spec.num_ranks_per_worker
    return _scaled(spec.config or {}, base * each, workers * each, auto_of(spec))


def resolved_at(spec: ZeroTrainingJobSpec, base: int, workers: int) -> EngineConfig:
    """Return the configuration of `config_at`, resolved: everything else that depends on the number of ranks
    is checked, too. Raises ConfigError."""
    each = spec.num_ranks_per_worker
    # Use the text as key, since True, 1 and 1.0 are one key but not one value.
    text, auto = json.dumps(spec.config or {}, sort_keys=True), auto_of(spec)
    base_ranks, ranks = base * each, workers * each

    def resolved() -> EngineConfig:
        return resolve(load(_scaled(own_json(text), base_ranks, ranks, auto)), world_size=ranks, auto=auto)

    return _outcomes_at.of(text, (base_ranks, ranks, auto), resolved)


def _scaled(config: dict[str, Any], base_ranks: int, ranks: int, auto: AutoValues) -> dict[str, Any]:
    return with_batch(config, global_batch(config, world_size=base_ranks, auto=auto).at(ranks))


def refusal_of_size(spec: ZeroTrainingJobSpec, base: int, workers: int) -> str | None:
    """Return why the job cannot run with the number of workers, with the figures; None when it can."""
    try:
        config = resolved_at(spec, base, workers)
    except ConfigError as error:
        return f"{workers} workers x {spec.num_ranks_per_worker} ranks: {error}"
    refused = config.unsupported[:1]
    return (
        f"{workers} workers: {refused[0].path}: {refused[0].reason} {refused[0].way_out}" if refused else None
    )


def largest_size(
    spec: ZeroTrainingJobSpec, base: int, *, at_most: int, fits: Callable[[int], bool]
) -> int | None:
    """Return the largest size up to `at_most` that works, `fits` and is within the bounds of spec.elastic.
    None if there is none, or if the configuration does not resolve for `base` itself."""
    if spec.elastic is None:
        return None
    try:
        batch = batch_of(spec, base)
    except ConfigError:
        return None
    sizes = batch.workers(
        ranks_per_worker=spec.num_ranks_per_worker,
        lowest=spec.elastic.min_workers,
        highest=min(at_most, spec.elastic.max_workers),
    )
    good = (size for size in reversed(sizes) if refusal_of_size(spec, base, size) is None and fits(size))
    return next(good, None)
