"""Memory plan of a job from its spec: the same for `zerotrain plan` and for the operator's admission.

Pure, and cached: a plan may take a tenth of a second, so the operator asks on its event loop only for cached
plans (`known_plan`), and makes the others in a thread (`plan_job`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from zerotrain.contract.planner import (
    Demand,
    Fit,
    Pace,
    Phase,
    Proposal,
    Rates,
    ShapeError,
    Tier,
    TierDemand,
    Workload,
    demand,
    nearest,
    pace,
    summary,
    way_out,
)

from .core.volumes import ClaimSource
from .memory_plan import MemoryPlan, NearestPlan, PlannedPace, PlannedPhase, PlannedTier
from .plan_inputs import most_workers, sheet_rates, terms_of, workload_of
from .spec import ZeroTrainingJobSpec
from .storage import Checkpoint, CheckpointVolume

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


_ANY_CHECKPOINT = Checkpoint(volume=CheckpointVolume(persistent_volume_claim=ClaimSource(claim_name="any")))
_WITHOUT_PLAN: Mapping[str, object] = {
    "data": "/any",
    "token_from": None,
    "eval": None,
    "early_stopping": None,
    "chat_template": None,
    "packing": False,
    "completion_only": None,
    "output": "output",
}
"""Settings of a fine-tuning that no plan depends on, with a value for all jobs."""


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
    read, without = spec, _WITHOUT_MEMORY
    if (asked := spec.finetune) is not None:
        epochs = None if asked.epochs is None else 1.0
        asked = asked.model_copy(update={**_WITHOUT_PLAN, "epochs": epochs})
        # A fine-tuning is no valid spec without a checkpoint.
        read = spec.model_copy(update={"finetune": asked, "checkpoint": _ANY_CHECKPOINT})
        without = _WITHOUT_MEMORY - {"checkpoint"}
    text = read.model_dump_json(by_alias=True, exclude_unset=True, exclude=without)
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


def status_of(plan: JobPlan) -> MemoryPlan:
    """Return the plan for `status.memoryPlan`: the figures of `zerotrain plan -o json`, in API spelling.

    Without a demand, it holds the verdict and the message alone.
    Zero and unknown values are left out: every write sends the object to all clients that watch jobs.
    """
    found, proposal = plan.demand, plan.proposal
    if found is None:
        return MemoryPlan(verdict=str(plan.verdict), message=plan.message, ranks=plan.ranks)
    sizes = {tier.tier: tier.per_rank_bytes for tier in found.tiers}
    nearest = None
    if proposal is not None:
        nearest = NearestPlan(changes=proposal.changes, tiers=_tiers(proposal.demand.tiers))
    return MemoryPlan(
        verdict=str(plan.verdict),
        message=plan.message,
        ranks=plan.ranks,
        gpu_bytes=sizes.get(Tier.GPU),
        host_bytes=sizes.get(Tier.HOST),
        pinned_bytes=sizes.get(Tier.PINNED),
        shared_bytes=sizes.get(Tier.SHARED),
        nvme_bytes=sizes.get(Tier.NVME),
        network_bytes=found.formulas.traffic.network_bytes,
        activation_bytes=_activations(found),
        tiers=_tiers(found.tiers),
        phases=tuple(_phase(phase) for phase in found.phases),
        nearest=nearest,
        pace=None if plan.pace is None else _pace(plan.pace),
    )


def _activations(found: Demand) -> int:
    """Return the activation bytes of one rank."""
    computes = found.tier(Tier.GPU) or found.tier(Tier.HOST)
    if computes is None:
        return 0
    ranks = 1 if computes.tier is Tier.GPU else found.workload.ranks_per_worker
    return computes.activation_bytes // ranks


def _tiers(found: Iterable[TierDemand]) -> tuple[PlannedTier, ...]:
    return tuple(
        PlannedTier(
            tier=str(tier.tier),
            per=tier.per,
            needed_bytes=tier.total_bytes,
            limit_bytes=None if tier.limit is None else tier.limit.num_bytes,
            margin_bytes=tier.margin_bytes,
        )
        for tier in found
    )


def _phase(phase: Phase) -> PlannedPhase:
    return PlannedPhase(
        name=phase.name,
        engine_bytes=phase.engine_bytes,
        activation_bytes=phase.activation_bytes or None,
        host_bytes=phase.host_bytes or None,
        network_bytes=phase.network_bytes or None,
    )


def _pace(pace: Pace) -> PlannedPace:
    """Return the pace, rounded: more digits than an estimate has would make a status longer for nothing."""
    return PlannedPace(
        seconds=float(f"{pace.seconds:.4g}"), bound_by=pace.bound_by, missing_rates=pace.missing or None
    )
