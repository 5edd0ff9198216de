"""Conversion of a job's plan to `status.memoryPlan`: the figures of `zerotrain plan -o json`, in API
spelling.

Zero and unknown values are left out: every write sends the object to all clients that watch jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerotrain.contract.planner import Demand, Pace, Phase, Tier, TierDemand

from .memory_plan import MemoryPlan, NearestPlan, PlannedPace, PlannedPhase, PlannedTier
from .planning import JobPlan


def status_of(plan: JobPlan) -> MemoryPlan:
    """Return the plan for `status.memoryPlan`; without a demand, the verdict and the message alone."""
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
