"""Texts about plans: the sentence in a condition, and the sentences under a table."""

from __future__ import annotations

from collections.abc import Iterator

from .demand import Demand, Fit, Tier, TierDemand
from .proposals import Proposal

GIB = 1 << 30
MIB = 1 << 20

PER = {Tier.GPU: "each GPU", Tier.NVME: "each worker's spill volume"}
WHERE = {
    Tier.GPU: "GPU memory",
    Tier.HOST: "host memory",
    Tier.PINNED: "pinned memory",
    Tier.SHARED: "shared memory",
    Tier.NVME: "disk",
}


def bytes_text(num_bytes: float) -> str:
    """Return a size in GiB from 1 GiB on, else in MiB, with its sign."""
    return f"{num_bytes / GIB:.1f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / MIB:.1f} MiB"


def summary(demand: Demand) -> str:
    """Return one sentence with the numbers of the tier that decides."""
    tier = decisive(demand)
    verdict = demand.verdict
    if tier is None:
        return "nothing of it is limited"
    if verdict is Fit.UNKNOWN:
        unknown = [item for item in demand.tiers if item.verdict is Fit.UNKNOWN]
        return "; ".join(f"{_need(item)}, and how much there is is not known" for item in unknown)
    return f"{_need(tier)}{_there(tier)}"


def decisive(demand: Demand) -> TierDemand | None:
    """Return the tier that has the verdict of the whole plan, the tightest of several."""
    same = [tier for tier in demand.tiers if tier.verdict is demand.verdict]
    limited = [tier for tier in same if tier.limit is not None]
    return min(limited, key=_relative_margin, default=next(iter(same), None))


def way_out(proposal: Proposal | None, demand: Demand) -> str:
    """Return what to do about a job that does not fit."""
    missing = " or ".join(_shortfall(demand))
    if proposal is None:
        return f"No setting that was looked at fits; {missing or 'take a smaller model'}."
    found = ", ".join(
        f"{bytes_text(tier.total_bytes)} of {WHERE[tier.tier]}"
        for tier in proposal.demand.tiers
        if tier.tier in (Tier.GPU, Tier.HOST, Tier.NVME)
    )
    return f"Nearest that fits: {' and '.join(proposal.changes)} ({found})."


def _shortfall(demand: Demand) -> Iterator[str]:
    for tier in demand.tiers:
        if tier.verdict is Fit.DOES_NOT_FIT:
            yield f"{_per(tier)} would have to have {bytes_text(tier.total_bytes)}"


def _per(tier: TierDemand) -> str:
    return PER.get(tier.tier, "each worker")


def _need(tier: TierDemand) -> str:
    parts = [f"{bytes_text(tier.exact_bytes)} by the engine's formulas"]
    if tier.activation_bytes:
        parts.append(f"{bytes_text(tier.activation_bytes)} of activations")
    if tier.overhead_bytes:
        parts.append(f"{bytes_text(tier.overhead_bytes)} of libraries and processes (estimated)")
    whole = f"{_per(tier)} needs {bytes_text(tier.total_bytes)} of {WHERE[tier.tier]}"
    return whole if len(parts) == 1 else f"{whole} ({', '.join(parts)})"


def _there(tier: TierDemand) -> str:
    if tier.limit is None:
        return ""
    return f" and has {bytes_text(tier.limit.num_bytes)} ({tier.limit.source})"


def _relative_margin(tier: TierDemand) -> float:
    limit = tier.limit.num_bytes if tier.limit is not None else 0
    return (tier.margin_bytes or 0) / max(1, limit)
