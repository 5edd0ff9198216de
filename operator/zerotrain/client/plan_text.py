"""`status.memoryPlan` of a job as text: its tiers, what is left of each, and the estimated time of a step."""

from __future__ import annotations

from zerotrain.client.formatting import size
from zerotrain.operator.api.memory_plan import MemoryPeaks, MemoryPlan, PlannedTier


def used_tiers(plan: MemoryPlan) -> tuple[tuple[str, int | None, int | None], ...]:
    """Return (tier, planned, observed) of the tiers that are used."""
    observed = plan.observed or MemoryPeaks()
    rows = (
        ("gpu", plan.gpu_bytes, observed.gpu_bytes),
        ("host", plan.host_bytes, observed.host_bytes),
        ("nvme", plan.nvme_bytes, observed.nvme_bytes),
    )
    return tuple(row for row in rows if row[1] or row[2])


def margin_text(plan: MemoryPlan, tier: str) -> str:
    """Return the margin of gpu, host, pinned, shared or nvme, such as `3.5 GiB (44%) of the worker's 8 GiB`;
    empty where it is unknown."""
    return next((_margin_text(item) for item in plan.tiers or () if item.tier == tier), "")


def _margin_text(tier: PlannedTier) -> str:
    if tier.limit_bytes is None or tier.margin_bytes is None or tier.limit_bytes <= 0:
        return ""
    part = f"{tier.margin_bytes / tier.limit_bytes:.0%}"
    whose = "GPU" if tier.tier == "gpu" else tier.per or "worker"
    return f"{size(tier.margin_bytes)} ({part}) of the {whose}'s {size(tier.limit_bytes)}"


def estimate_text(plan: MemoryPlan) -> str:
    """Return the estimate of a step, such as `about 1.9 s, bound by compute in backward`; empty where the
    plan has no speed."""
    pace = plan.pace
    if pace is None or not pace.seconds:
        return ""
    least = "at least" if pace.missing_rates else "about"
    missing = f" ({', '.join(pace.missing_rates)} not counted)" if pace.missing_rates else ""
    bound = f", bound by {pace.bound_by}" if pace.bound_by else ""
    which = "of the nearest that fits " if plan.nearest is not None and plan.nearest.changes else ""
    return f"{which}{least} {pace.seconds:.3g} s{bound}{missing}"
