"""`status.memoryPlan` as records: the plan for a job's ranks and workers, and the usage of rank 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from zerotrain.client.formatting import size
from zerotrain.client.lenient_json import Fields


@dataclass(frozen=True, kw_only=True, slots=True)
class TierMargin:
    """Limit and need of one kind of memory: of a rank's GPU, or of a worker with all of its ranks."""

    tier: str
    per: str
    """Owner of the memory: rank or worker."""
    needed_bytes: int
    limit_bytes: int | None
    margin_bytes: int | None
    """Bytes that are left of the limit; negative where it does not fit."""

    @classmethod
    def of(cls, fields: Fields) -> Self:
        return cls(
            tier=fields.text("tier"),
            per=fields.text("per"),
            needed_bytes=fields.count("neededBytes"),
            limit_bytes=fields.whole("limitBytes"),
            margin_bytes=fields.whole("marginBytes"),
        )

    @property
    def margin_text(self) -> str:
        """Return the margin as text, such as `3.5 GiB (44%) of the worker's 8 GiB`; empty where it is
        unknown."""
        if self.limit_bytes is None or self.margin_bytes is None or self.limit_bytes <= 0:
            return ""
        part = f"{self.margin_bytes / self.limit_bytes:.0%}"
        whose = "GPU" if self.tier == "gpu" else self.per or "worker"
        return f"{size(self.margin_bytes)} ({part}) of the {whose}'s {size(self.limit_bytes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Predicted peak memory of one rank, and the observed usage of rank 0."""

    fit: str
    message: str
    ranks: int | None
    gpu_bytes: int | None
    host_bytes: int | None
    nvme_bytes: int | None
    margins: tuple[TierMargin, ...]
    """Limit of each tier, and what is left of it."""
    nearest: tuple[str, ...]
    """Changes with which the job would fit, where it does not."""
    step_seconds: float | None
    """Step time estimated from data sheets; None where the plan has no speed."""
    bound_by: str
    missing_rates: tuple[str, ...]
    """Speeds that were not known, so that a step takes longer than `step_seconds`."""
    observed_gpu_bytes: int | None
    observed_host_bytes: int | None
    observed_nvme_bytes: int | None

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        if not fields:
            return None
        observed, pace = fields.part("observed"), fields.part("pace")
        return cls(
            fit=fields.text("verdict"),
            message=fields.text("message"),
            ranks=fields.whole("ranks"),
            gpu_bytes=fields.whole("gpuBytes"),
            host_bytes=fields.whole("hostBytes"),
            nvme_bytes=fields.whole("nvmeBytes"),
            margins=tuple(TierMargin.of(item) for item in fields.parts("tiers")),
            nearest=fields.part("nearest").texts("changes"),
            step_seconds=pace.number("seconds"),
            bound_by=pace.text("boundBy"),
            missing_rates=pace.texts("missingRates"),
            observed_gpu_bytes=observed.whole("gpuBytes"),
            observed_host_bytes=observed.whole("hostBytes"),
            observed_nvme_bytes=observed.whole("nvmeBytes"),
        )

    @property
    def tiers(self) -> tuple[tuple[str, int | None, int | None], ...]:
        """Return (tier, planned, observed) of the tiers that are used."""
        rows = (
            ("gpu", self.gpu_bytes, self.observed_gpu_bytes),
            ("host", self.host_bytes, self.observed_host_bytes),
            ("nvme", self.nvme_bytes, self.observed_nvme_bytes),
        )
        return tuple(row for row in rows if row[1] or row[2])

    def margin_text(self, tier: str) -> str:
        """Return the margin of gpu, host, pinned, shared or nvme; empty where it is unknown."""
        return next((item.margin_text for item in self.margins if item.tier == tier), "")

    @property
    def estimate(self) -> str:
        """Return the estimate as text, such as `about 1.9 s, bound by compute in backward`; empty where the
        plan has no speed."""
        if self.step_seconds is None:
            return ""
        least = "at least" if self.missing_rates else "about"
        missing = f" ({', '.join(self.missing_rates)} not counted)" if self.missing_rates else ""
        bound = f", bound by {self.bound_by}" if self.bound_by else ""
        which = "of the nearest that fits " if self.nearest else ""
        return f"{which}{least} {self.step_seconds:.3g} s{bound}{missing}"
