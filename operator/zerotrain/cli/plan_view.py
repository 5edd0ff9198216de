"""Output of `zerotrain plan`: whether the job fits, then the numbers, then the assumptions behind them; or
JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from zerotrain.contract.planner import (
    ASSUMPTIONS,
    ESTIMATES,
    Demand,
    Fit,
    Pace,
    Rates,
    Tier,
    TierDemand,
    bytes_text,
    count_text,
    summary,
    way_out,
)
from zerotrain.contract.text import printable

if TYPE_CHECKING:
    from zerotrain.operator.api.planning import JobPlan

STYLES = {
    Fit.FITS: "bold green",
    Fit.TIGHT: "bold yellow",
    Fit.UNKNOWN: "bold yellow",
    Fit.DOES_NOT_FIT: "bold red",
}
NAMES = {
    Tier.GPU: "GPU of a rank",
    Tier.HOST: "host of a worker",
    Tier.PINNED: "  of it pinned",
    Tier.SHARED: "  of it shared",
    Tier.NVME: "NVMe of a worker",
}
MIN_COLUMNS = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All data that is printed."""

    name: str
    plan: JobPlan
    config_from: str
    """Source of the configuration."""
    rates: Rates
    price_per_worker: float | None

    @property
    def pace(self) -> Pace | None:
        return self.plan.pace

    @property
    def is_refused(self) -> bool:
        return self.plan.verdict is Fit.DOES_NOT_FIT

    @property
    def cost_per_billion(self) -> float | None:
        """Cost of 10^9 tokens; None if the price or any part of the step time is unknown."""
        if self.pace is None or self.price_per_worker is None or self.pace.missing:
            return None
        return self.pace.cost_per_billion(self.price_per_worker * self.pace.workers)


def print_plan(answer: Answer) -> None:
    """Print the whole page. Numbers of one kind are in one column."""
    console, found = wide_console(), answer.plan.demand
    assert found is not None  # planned from a demand
    console.print(f"{answer.name}:", end=" ", markup=False)
    console.print(str(answer.plan.verdict), style=STYLES[answer.plan.verdict], end=": ")
    console.print(summary(found), markup=False)  # without the way out, which has a line of its own
    if answer.is_refused:
        console.print(way_out(answer.plan.proposal, found), markup=False)
    for line in ("", *_facts(found), ""):
        console.print(line, markup=False)
    _tiers(console, found)
    _phases(console, found)
    _traffic(console, found)
    _pace(console, answer)
    _assumptions(console, answer, found)


def wide_console() -> Console:
    """Return a console that never cuts numbers: a narrow terminal wraps the line."""
    return Console(soft_wrap=True, highlight=False, width=max(MIN_COLUMNS, Console().width))


def _facts(found: Demand) -> list[str]:
    load, inputs = found.workload, found.formulas.inputs
    config, shape = load.config, load.shape
    batch, samples = config.batch, config.batch.train_batch_size
    ranks = f"{load.workers} x {load.ranks_per_worker} = {config.world_size} ranks"
    recompute = ", activations recomputed" if config.activation_checkpointing.configured else ""
    tiers = [f"states on {inputs.optimizer_tier}"] if inputs.optimizer_tier != "gpu" else []
    tiers += [f"parameters on {inputs.param_tier}"] if inputs.param_tier != "gpu" else []
    return [
        f"model     {shape.source}: {count_text(shape.parameters)} parameters, "
        f"{shape.layers} layers of width {shape.width}, {shape.context} tokens a sample",
        f"job       {ranks} on {'CPUs' if load.on_host else 'GPUs'}, ZeRO stage {config.zero.stage}"
        f"{''.join(f', {tier}' for tier in tiers)}{recompute}",
        f"batch     {batch.micro_batch_size} x {batch.gradient_accumulation_steps} x {config.world_size} = "
        f"{samples} samples, {count_text(samples * shape.context)} tokens a step",
        f"bytes     per parameter: weight {inputs.compute_bytes}, gradient {inputs.grad_bytes}, "
        f"states {inputs.optimizer_bytes}; on the wire {inputs.reduce_bytes}",
    ]


def _table(*columns: str, title: str = "") -> Table:
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _tiers(console: Console, found: Demand) -> None:
    table = _table("memory", "engine", "activations", "estimated", "needed", "limit", "margin", "fit")
    for tier in found.tiers:
        parts = (tier.exact_bytes, tier.activation_bytes, tier.overhead_bytes, tier.total_bytes)
        table.add_row(NAMES[tier.tier], *(_size(part) for part in parts), *_margin(tier))
    console.print(table, markup=False)
    console.print()


def _margin(tier: TierDemand) -> tuple[str, str, str]:
    if tier.limit is None or tier.margin_bytes is None:
        return "?" if tier.is_enforced else "", "", str(tier.verdict) if tier.is_enforced else ""
    margin = f"{tier.margin_bytes / tier.limit.num_bytes:+.0%}"
    return bytes_text(tier.limit.num_bytes), margin, str(tier.verdict)


def _phases(console: Console, found: Demand) -> None:
    where = "host memory" if found.workload.on_host else "GPU"
    host_column = ("also on host",) if any(phase.host_bytes for phase in found.phases) else ()
    columns = ("phase", "engine", "activations", "together", *host_column)
    table = _table(*columns, title=f"one rank's {where} by phase")
    for phase in found.phases:
        sizes = (phase.engine_bytes, phase.activation_bytes, phase.total_bytes, phase.host_bytes)
        table.add_row(phase.name, *(_size(size) for size in sizes[: len(columns) - 1]))
    console.print(table, markup=False)
    gpu, freed = found.formulas.gpu, found.formulas.freed.total_bytes
    kept = {
        "weights": gpu.param_bytes + gpu.replicated_bytes,
        "frozen": gpu.frozen_bytes,
        "second copy": gpu.secondary_bytes,
        "gradients": gpu.grad_bytes - freed,
        "states": gpu.optimizer_bytes,
    }
    text = ", ".join(f"{name} {bytes_text(size)}" for name, size in kept.items() if size)
    if freed:
        text += f"; from backward to the update also gradients {bytes_text(freed)}"
    console.print(f"between steps: {text}\n", markup=False)


def _traffic(console: Console, found: Demand) -> None:
    traffic = found.formulas.traffic
    rows = (
        ("network, forward", traffic.phases.forward_bytes),
        ("network, backward", traffic.phases.backward_bytes),
        ("network, updated weights", traffic.phases.step_bytes),
        ("  of it between workers", traffic.cross_node_bytes if found.workload.workers > 1 else 0),
        ("up to the GPU", traffic.pcie_up_bytes),
        ("down from the GPU", traffic.pcie_down_bytes),
        ("drive, read and written", traffic.nvme_bytes),
    )
    if not any(size for _, size in rows):
        return
    table = _table("moves", "payload", title="one rank in one step")
    for name, size in rows:
        if size:
            table.add_row(name, _size(size))
    console.print(table, markup=False)
    if found.formulas.inputs.shares_memory:
        console.print("Ranks of one worker on CPUs read each other's memory: that payload is not sent.")
    console.print()


def _pace(console: Console, answer: Answer) -> None:
    found = answer.pace
    if found is None:
        console.print("step time: no rate is known; give --gpu, --rate or --probe\n", markup=False)
        return
    which = "one step of the nearest that fits" if answer.plan.proposal is not None else "one step"
    table = _table("phase", "waits for", "amount", "seconds", "", title=f"{which}, estimated")
    for part in found.parts:
        hidden = "hidden" if part.is_hidden else ""
        table.add_row(part.phase, part.what, part.amount, f"{part.seconds:.3g}", hidden)
    console.print(table, markup=False)
    least = "at least " if found.missing else "about "
    console.print(
        f"{least}{found.seconds:.3g} s a step, bound by {found.bound_by}: "
        f"{count_text(round(found.tokens_per_second))} tokens/s",
        markup=False,
    )
    if found.missing:
        names = ", ".join(f"--rate {name}=" for name in found.missing)
        console.print(f"not counted, as the rate is not known: {names}", markup=False)
    cost = answer.cost_per_billion
    if cost is not None:
        console.print(f"{cost:,.2f} per billion tokens at {answer.price_per_worker:g} a worker and hour")
    elif answer.price_per_worker is not None:
        console.print("no cost: rates are missing, so that it would be too low")
    console.print()


def _assumptions(console: Console, answer: Answer, found: Demand) -> None:
    notes = ["engine: by the byte formulas that the engine checks its own allocations against"]
    if answer.config_from != "spec.config":
        place = printable(answer.config_from)
        notes.append(f"configuration: {place}; the cluster's ConfigMap may be another")
    notes += [f"activations: {text}" for text in ASSUMPTIONS]
    if found.workload.shape.is_guess:
        notes.append("the model's shape is guessed from its size: only what is sharded decides a refusal")
    notes += [f"estimated: {text}" for text in ESTIMATES]
    used = {name: source for name, source in answer.rates.sources.items() if answer.pace is not None}
    for source in dict.fromkeys(used.values()):
        rates = ", ".join(
            f"{name} {getattr(answer.rates, name):.4g}" for name, item in used.items() if item == source
        )
        notes.append(f"rates, {source}: {rates}")
    console.print("assumptions", style="bold")
    for note in notes:
        console.print(f"- {note}", markup=False)


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer for other programs, with sizes in bytes."""
    found = answer.plan.demand
    assert found is not None  # planned from a demand
    proposal = answer.plan.proposal
    return {
        "job": answer.name,
        "verdict": str(answer.plan.verdict),
        "message": answer.plan.message,
        "config_from": answer.config_from,
        "ranks": answer.plan.ranks,
        "parameters": found.workload.shape.parameters,
        "tiers": [_tier_json(tier) for tier in found.tiers],
        "phases": [asdict(phase) for phase in found.phases],
        "traffic": asdict(found.formulas.traffic),
        "nearest": None if proposal is None else list(proposal.changes),
        "nearest_tiers": None if proposal is None else [_tier_json(tier) for tier in proposal.demand.tiers],
        "pace": None if answer.pace is None else _pace_json(answer),
        "assumptions": [*ASSUMPTIONS, *ESTIMATES],
    }


def _tier_json(tier: TierDemand) -> dict[str, Any]:
    return {
        "tier": str(tier.tier),
        "per": tier.per,
        "per_rank_bytes": tier.per_rank_bytes,
        "engine_bytes": tier.exact_bytes,
        "activation_bytes": tier.activation_bytes,
        "estimated_bytes": tier.overhead_bytes,
        "needed_bytes": tier.total_bytes,
        "least_bytes": tier.least_bytes,
        "limit_bytes": tier.limit.num_bytes if tier.limit is not None else None,
        "margin_bytes": tier.margin_bytes,
        "limit_from": tier.limit.source if tier.limit is not None else None,
        "verdict": str(tier.verdict),
    }


def _pace_json(answer: Answer) -> dict[str, Any]:
    assert answer.pace is not None  # asked for by the caller
    return {
        "seconds": answer.pace.seconds,
        "tokens": answer.pace.tokens,
        "tokens_per_second": answer.pace.tokens_per_second,
        "bound_by": answer.pace.bound_by,
        "missing_rates": list(answer.pace.missing),
        "parts": [asdict(part) for part in answer.pace.parts],
        "cost_per_billion_tokens": answer.cost_per_billion,
    }


def _size(num_bytes: int) -> str:
    return bytes_text(num_bytes) if num_bytes else "-"
