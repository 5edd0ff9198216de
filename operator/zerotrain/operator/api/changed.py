"""Check of a job after a change that the planner proposes, by the rules for every job.

The API's own rules and admission judge the changed spec, so that no proposal ends in a refusal.
"""

from __future__ import annotations

from dataclasses import replace

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.config.edit import edited
from zerotrain.contract.planner import Edits, Reader, Terms, Tier, Workload
from zerotrain.contract.planner.changes import MAX_WORKER_FACTOR
from zerotrain.operator.constants import MAX_WORKERS

from .admission import refusals, spill_limit
from .configuration import engine_config, resolved_at
from .quantity import Quantity
from .spec import ZeroTrainingJobSpec
from .storage import Nvme

_ROOMY = Nvme(size=Quantity("1Ei"))
"""Stand-in for the volume that the user must add for a proposal that spills."""


def most_workers(spec: ZeroTrainingJobSpec, workers: int) -> int:
    """Return the largest number of workers, up to 16 times `workers`, that the API's rules allow; else
    `workers` itself."""
    factor = MAX_WORKER_FACTOR
    while factor > 1:
        if _is_valid(spec.model_copy(update={"workers": workers * factor})):
            return workers * factor
        factor //= 2
    return workers


def terms_of(spec: ZeroTrainingJobSpec, workload: Workload, *, base_workers: int | None, most: int) -> Terms:
    """Return the terms of a proposal for this job. `base_workers`: for an elastic job, the size whose global
    batch it keeps. `most`: maximum number of workers."""
    config, base_ranks = workload.config, None
    if base_workers is not None:
        base_ranks = base_workers * spec.num_ranks_per_worker
        # The configuration as in the file, not as rendered for the size of an attempt.
        config = engine_config(spec, world_size=base_ranks) or config
    return Terms.of(
        config,
        base_ranks=base_ranks,
        has_volume=spec.nvme is not None,
        most_workers=most,
        reader=_reader(spec, workload, base_workers),
    )


def _reader(spec: ZeroTrainingJobSpec, workload: Workload, base: int | None) -> Reader:
    def read(edits: Edits, workers: int) -> Workload | None:
        try:
            changed = spec.model_copy(update={"config": edited(spec.config or {}, edits), "workers": workers})
            if spec.nvme is None and "nvme" in edits.values():
                changed = changed.model_copy(update={"nvme": _ROOMY})
            config = _admitted(changed, workload, base)
        except ConfigError:
            return None
        return None if config is None else _on(workload, spec, config)

    return read


def _admitted(changed: ZeroTrainingJobSpec, workload: Workload, base: int | None) -> EngineConfig | None:
    """Return the configuration that the ranks would run; None if the job would be refused. Raises
    ConfigError."""
    if changed.workers != workload.workers and not _is_valid(changed):
        return None
    if base is None:
        return None if refusals(changed) else engine_config(changed)
    # Admission judges an elastic job by the size whose batch it keeps, which is spec.workers until it starts.
    sizes = {base, changed.workers} if workload.workers == base else {base}
    if any(refusals(changed.model_copy(update={"workers": size})) for size in sizes):
        return None
    config = resolved_at(changed, base, changed.workers)
    return None if config.unsupported else config


def _is_valid(spec: ZeroTrainingJobSpec) -> bool:
    """Return whether the API server would accept the number of workers."""
    rules = [rule.holds for rule in spec.RULES if rule.holds is not None]
    return spec.workers <= MAX_WORKERS and all(holds(spec) for holds in rules)


def _on(workload: Workload, spec: ZeroTrainingJobSpec, config: EngineConfig) -> Workload:
    """Return the workload with another configuration. A volume that is yet to be added is as large as the
    spill may get."""
    limits, most = dict(workload.limits), config.zero.spill.max_bytes
    if spec.nvme is None and most is not None:
        limits[Tier.NVME] = spill_limit(most, spec.num_ranks_per_worker)
    return replace(workload, config=config, limits=limits)
