"""Memory plan of a job from its spec: the same for `zerotrain plan` and for the operator's admission.

Pure, and cached: a plan may take a tenth of a second, so the operator asks on its event loop only for cached
plans (`known_plan`), and makes the others in a thread (`plan_job`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.planner import (
    Accelerator,
    Demand,
    Fit,
    Limit,
    ModelShape,
    Pace,
    Proposal,
    Rates,
    ShapeError,
    Tier,
    Workload,
    accelerator,
    demand,
    gpt_shape,
    guessed_shape,
    nearest,
    pace,
    rates_of,
    summary,
    way_out,
)
from zerotrain.contract.presets import PRESETS
from zerotrain.contract.train_spec import GptSpec

from .admission import spill_limit
from .changed import most_workers, terms_of
from .configuration import engine_config, resolved_at
from .spec import ZeroTrainingJobSpec
from .storage import Encryption

LABEL_PRODUCT = "nvidia.com/gpu.product"
LABEL_MEMORY = "nvidia.com/gpu.memory"
"""Labels of NVIDIA's GPU feature discovery; the second one is in MiB."""

MAX_PLANS = 512
"""Maximum number of cached plans; the newest are kept."""

_Key = tuple[str, int, int | None, int]
_plans: dict[_Key, JobPlan] = {}
_plans_change = threading.Lock()

_WITHOUT_MEMORY = {
    "workers",
    "elastic",
    "failure_policy",
    "hang_policy",
    "run_policy",
    "pod_template",
    "checkpoint",
    "managed_by",
    "suspend",
}
"""Fields that a plan depends on only through the number of workers that they allow, which is found before
they are left out; `workers` is an argument of its own."""


class PlanMissing(Exception):
    """Error of `known_plan`: this plan has not been made yet."""


class Planner(Protocol):
    """Type of `plan_job` and `known_plan`."""

    def __call__(
        self, spec: ZeroTrainingJobSpec, *, workers: int | None = None, base_workers: int | None = None
    ) -> JobPlan: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Plan of one job at one size."""

    verdict: Fit
    message: str
    ranks: int
    demand: Demand | None = None
    """Memory demand; None when the job cannot be planned, and the message says why."""
    proposal: Proposal | None = None

    pace: Pace | None = None
    """Duration of a step by the given rates, of the proposal if there is one; None without rates."""


def plan_job(
    spec: ZeroTrainingJobSpec, *, workers: int | None = None, base_workers: int | None = None
) -> JobPlan:
    """Plan a job as the operator does, from its spec alone. Raises nothing for a spec that is admitted.

    `workers`: size of the attempt, if it is not the spec's. `base_workers`: for an elastic job, the size
    whose global batch it keeps.
    """
    key = _key(spec, workers, base_workers)
    found = _plans.get(key)
    if found is None:
        found = _planned(*key)
        with _plans_change:
            while len(_plans) >= MAX_PLANS:
                _plans.pop(next(iter(_plans)))
            _plans[key] = found
    return found


def known_plan(
    spec: ZeroTrainingJobSpec, *, workers: int | None = None, base_workers: int | None = None
) -> JobPlan:
    """Return the plan that `plan_job` would, if it is cached. Raises PlanMissing otherwise."""
    found = _plans.get(_key(spec, workers, base_workers))
    if found is None:
        raise PlanMissing
    return found


def _key(spec: ZeroTrainingJobSpec, workers: int | None, base_workers: int | None) -> _Key:
    """Return the cache key. It holds the spec as text, since specs contain dictionaries, which are not
    hashable."""
    text = spec.model_dump_json(by_alias=True, exclude_unset=True, exclude=_WITHOUT_MEMORY)
    count = workers or spec.workers
    return text, count, base_workers, most_workers(spec, count)


def _planned(text: str, workers: int, base_workers: int | None, most: int) -> JobPlan:
    spec = ZeroTrainingJobSpec.model_validate_json(text, by_alias=True)
    ranks = workers * spec.num_ranks_per_worker
    try:
        workload = workload_of(spec, workers=workers, base_workers=base_workers)
    except ShapeError as error:
        return JobPlan(verdict=Fit.UNKNOWN, message=f"not planned: {error}", ranks=ranks)
    return plan_of(workload, spec, base_workers=base_workers, most=most, rates=sheet_rates(spec, workload))


def plan_of(
    workload: Workload,
    spec: ZeroTrainingJobSpec,
    *,
    base_workers: int | None = None,
    most: int | None = None,
    rates: Rates | None = None,
) -> JobPlan:
    """Return the verdict about the workload of a job, with a proposal that fits if the workload does not.

    `base_workers`: as for `plan_job`. `most`: workers that may be proposed; as the spec allows unless given.
    `rates`: rates by which a step is timed; none unless given.
    """
    found = demand(workload)
    message, proposal = summary(found), None
    if found.verdict is Fit.DOES_NOT_FIT:
        if most is None:
            most = most_workers(spec, workload.workers)
        proposal = nearest(workload, terms_of(spec, workload, base_workers=base_workers, most=most))
        message = f"{message}. {way_out(proposal, found)}"
    # The speed of a workload that cannot run is of no use: time the nearest one that can.
    timed = found if proposal is None else proposal.demand
    return JobPlan(
        verdict=found.verdict,
        message=message,
        ranks=workload.config.world_size,
        demand=found,
        proposal=proposal,
        pace=None if rates is None else pace(timed, rates),
    )


def workload_of(
    spec: ZeroTrainingJobSpec,
    *,
    workers: int | None = None,
    base_workers: int | None = None,
    shape: ModelShape | None = None,
    device: Accelerator | None = None,
) -> Workload:
    """Return the planner's view of a job. `shape` and `device` replace what the spec says of model and GPU.

    Raises ShapeError when the model or the configuration cannot be read from the spec.
    """
    count = workers or spec.workers
    try:
        if base_workers is not None:
            config: EngineConfig | None = resolved_at(spec, base_workers, count)
        else:
            config = engine_config(spec, world_size=count * spec.num_ranks_per_worker)
    except ConfigError as error:
        raise ShapeError(f"the configuration does not resolve for {count} workers: {error}") from error
    if config is None:
        raise ShapeError(_by_reference(spec))
    known = shape if shape is not None else shape_of(spec)
    asked, volume = config.zero.spill.encryption, spec.nvme.encryption if spec.nvme is not None else None
    return Workload(
        shape=known,
        config=config,
        ranks_per_worker=spec.num_ranks_per_worker,
        on_host=spec.num_gpus == 0,
        is_encrypted="None" not in (asked, None if volume is None else Encryption(volume).value),
        limits=limits_of(spec, spill_bytes=config.zero.spill.max_bytes, device=device),
    )


def _by_reference(spec: ZeroTrainingJobSpec) -> str:
    name = spec.config_from.config_map_key_ref.name if spec.config_from is not None else "?"
    return (
        f"the configuration is in ConfigMap {name} (spec.configFrom), which only the workers read. "
        "`zerotrain plan JOB.YAML` plans it: from the ConfigMap in the same file, or with --config FILE"
    )


def shape_of(spec: ZeroTrainingJobSpec) -> ModelShape:
    """Return the model's sizes, as far as the spec has them. Raises ShapeError."""
    model = spec.model
    if model is None:
        raise ShapeError("the program is the user's own and spec.model is not given")
    if model.gpt is not None:
        gpt = model.gpt
        sizes = GptSpec(d_model=gpt.d_model, layers=gpt.layers, heads=gpt.heads, context=gpt.context)
        return gpt_shape(sizes, source="spec.model.gpt")
    if model.preset is not None:
        if model.preset not in PRESETS:
            raise ShapeError(f"spec.model.preset {model.preset!r} is unknown")
        return gpt_shape(PRESETS[model.preset], source=f"preset {model.preset}")
    if model.parameters is not None:
        return guessed_shape(model.parameters, context=model.factory.context if model.factory else None)
    where = f"only the workers see {model.path}" if model.path else "a factory's model is not built here"
    raise ShapeError(f"{where}; give its size as spec.model.parameters")


def limits_of(
    spec: ZeroTrainingJobSpec, *, spill_bytes: int | None = None, device: Accelerator | None = None
) -> dict[Tier, Limit]:
    """Return the memory limits: of one GPU for the GPU, of one worker for all other kinds of memory."""
    limits: dict[Tier, Limit] = {}
    resources, nvme = spec.resources, spec.nvme
    if spec.num_gpus:
        found = _device_limit(spec, device)
        limits |= {Tier.GPU: found} if found is not None else {}
    if resources is not None and resources.memory is not None:
        limits[Tier.HOST] = Limit(num_bytes=resources.memory.num_bytes, source="spec.resources.memory")
    if resources is not None and resources.pinned_memory is not None:
        limits[Tier.PINNED] = Limit(
            num_bytes=resources.pinned_memory.num_bytes, source="spec.resources.pinnedMemory"
        )
    if nvme is not None:
        limits[Tier.NVME] = Limit(num_bytes=nvme.size.num_bytes, source="spec.nvme.size")
        allowed = None if spill_bytes is None else spill_limit(spill_bytes, spec.num_ranks_per_worker)
        if allowed is not None and allowed.num_bytes < nvme.size.num_bytes:
            limits[Tier.NVME] = allowed
    return limits


def _device_limit(spec: ZeroTrainingJobSpec, device: Accelerator | None) -> Limit | None:
    """Return the limit of one GPU: from the caller, else the spec, else the labels of the nodes that the spec
    asks for."""
    if device is not None:
        return Limit(num_bytes=device.memory_bytes, source=device.name)
    gpus = spec.resources.gpus if spec.resources is not None else None
    if gpus is not None and gpus.memory is not None:
        return Limit(num_bytes=gpus.memory.num_bytes, source="spec.resources.gpus.memory")
    return _by_labels((spec.scheduling.node_selector if spec.scheduling else None) or {})


def _by_labels(labels: Mapping[str, str]) -> Limit | None:
    where = "spec.scheduling.nodeSelector"
    memory, product = labels.get(LABEL_MEMORY, ""), labels.get(LABEL_PRODUCT)
    if memory.isascii() and memory.isdigit() and 0 < int(memory) < 1 << 40:
        return Limit(num_bytes=int(memory) << 20, source=f"{where}[{LABEL_MEMORY}]")
    known = accelerator(product) if product else None
    return None if known is None else Limit(num_bytes=known.memory_bytes, source=f"{known.name}, {where}")


def sheet_rates(spec: ZeroTrainingJobSpec, workload: Workload, device: Accelerator | None = None) -> Rates:
    """Return rates by the data sheet of `device`, else of the GPU that the spec names; no rates on CPUs."""
    found = (device or device_of(spec)) if spec.num_gpus else None
    return rates_of(found, workload.config.precision.product_dtype)


def device_of(spec: ZeroTrainingJobSpec) -> Accelerator | None:
    """Return the GPU that the labels of the requested nodes name, for its speed."""
    labels = (spec.scheduling.node_selector if spec.scheduling else None) or {}
    product = labels.get(LABEL_PRODUCT)
    return accelerator(product) if product else None
