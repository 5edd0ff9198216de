"""The charts as SVG elements inside the page.

Their colours are variables of the page, so that they follow dark mode and print, and their text stays text.
matplotlib draws with stand-in colours that are replaced afterwards. No label is read as mathematics or
markup, because names come from clusters.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from zerotrain.cli.report.facts import Mark, MemoryRow, Span, curves, kept_points
from zerotrain.contract.history import AttemptHistory, Point
from zerotrain.contract.text import one_line

COLOURS = {
    "text": "#010101",
    "grid": "#020202",
    "line": "#030303",
    "band": "#040404",
    "lost": "#050505",
    "good": "#060606",
    "wait": "#070707",
    "bad": "#080808",
    "phase1": "#090909",
    "phase2": "#0a0a0a",
    "phase3": "#0b0b0b",
    "phase4": "#0c0c0c",
    "phase5": "#0d0d0d",
    "phase6": "#0e0e0e",
}
"""Stand-in colour that matplotlib draws with, by the name of the page's variable."""

PHASES = ("data", "forward", "backward", "reduce", "optimizer")
OTHER = "other"
WIDTH_IN, HEIGHT_IN = 8.6, 2.9
GIB = 1 << 30


def loss(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the loss against the step; None if no step had a finite one."""
    return _by_step(
        attempts,
        "loss",
        value=lambda point: point.loss,
        low=lambda point: point.loss_low,
        high=lambda point: point.loss_high,
    )


def grad_norm(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the gradient norm before clipping. The band reaches to the largest norm of merged steps."""
    return _by_step(
        attempts,
        "gradient norm",
        value=lambda point: point.grad_norm,
        low=lambda point: point.grad_norm,
        high=lambda point: point.grad_norm_high,
        may_be_log=True,
    )


def learning_rate(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the learning rate of the first parameter group."""
    return _by_step(attempts, "learning rate", value=lambda point: point.learning_rate)


def throughput(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the tokens per second of all ranks together."""
    return _by_step(
        attempts, "tokens/s", value=lambda point: point.tokens / point.seconds if point.seconds else None
    )


def utilisation(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the model FLOPs utilisation; None where the devices' peak is not known."""
    return _by_step(
        attempts, "MFU", value=lambda point: point.flops / point.peak_flops if point.peak_flops else None
    )


def step_time(attempts: Sequence[AttemptHistory]) -> str | None:
    """Draw the parts of a step's time on rank 0 as stacked areas."""
    points = [point for point in kept_points(attempts) if point.seconds > 0]
    if len(points) < 2:
        return None
    rows = [breakdown(point) for point in points]
    names = [name for name in (*PHASES, OTHER) if any(row.get(name, 0.0) > 0 for row in rows)]
    with _figure("steptime") as (figure, axes):
        axes.stackplot(
            [point.step for point in points],
            [[row.get(name, 0.0) for row in rows] for name in names],
            labels=names,
            colors=[COLOURS[f"phase{at + 1}"] for at in range(len(names))],
            linewidth=0,
        )
        # Start-up effects of a first step would flatten all others.
        totals = sorted(sum(row.values()) for row in rows)
        axes.set_ylim(0, 1.25 * totals[int(0.98 * (len(totals) - 1))] or None)
        _labels(axes, "step", "seconds a step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncol=len(names), frameon=False)
        return _svg(figure, "Seconds of a step by phase, against the step")


def breakdown(point: Point) -> dict[str, float]:
    """Return the mean seconds of one step by phase. `other` is the time that no phase accounts for."""
    parts = {name: seconds / point.steps for name, seconds in point.phases.items() if name in PHASES}
    rest = point.seconds / point.steps - sum(parts.values())
    return {**parts, OTHER: max(0.0, rest)}


def memory(rows: Sequence[MemoryRow]) -> str | None:
    """Draw the planned and the measured peak of a rank side by side."""
    if not rows:
        return None
    with _figure("memory", height=0.9 + 0.62 * len(rows)) as (figure, axes):
        for at, row in enumerate(reversed(rows)):
            pairs = ((row.planned, "planned", "band", 0.2), (row.measured, "measured", "line", -0.2))
            for size, name, colour, offset in pairs:
                if size is None:
                    continue
                axes.barh(at + offset, size / GIB, height=0.36, color=COLOURS[colour])
                label = f"{bytes_text(size)} {name}"
                place = (size / GIB, at + offset)
                axes.annotate(label, place, xytext=(5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
        axes.set_xlim(0, 1.45 * max(max(row.planned or 0, row.measured or 0) for row in rows) / GIB)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        _labels(axes, "GiB of one rank, at its peak", "")
        return _svg(figure, "Memory of one rank: planned against measured")


def timeline(spans: Sequence[Span], marks: Sequence[Mark]) -> str | None:
    """Draw the attempts over time, with checkpoints and failures."""
    spans = [span for span in spans if span.start > 0]
    if not spans:
        return None
    shown = spans[-24:]
    rows = {span.attempt: len(shown) - 1 - at for at, span in enumerate(shown)}
    first = min(span.start for span in shown)
    unit, name = _unit(max(span.end for span in shown) - first)
    with _figure("timeline", height=1.0 + 0.34 * len(shown)) as (figure, axes):
        for span in shown:
            start, length = (span.start - first) / unit, max(span.end - span.start, 0.0) / unit
            axes.barh(
                rows[span.attempt], length, left=start, height=0.5, color=COLOURS[span.tone], alpha=0.55
            )
        for kind, symbol, colour in (("checkpoint", "|", "text"), ("failure", "X", "bad")):
            found = [
                mark for mark in marks if mark.kind == kind and mark.attempt in rows and mark.time >= first
            ]
            if not found:
                continue
            axes.plot(
                [(mark.time - first) / unit for mark in found],
                [rows[mark.attempt] for mark in found],
                symbol,
                color=COLOURS[colour],
                markersize=9,
                label=kind,
                linestyle="none",
            )
        axes.set_yticks(list(rows.values()), [f"attempt {attempt}" for attempt in rows])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        _labels(axes, f"{name} since {moment_text(first)}", "")
        if marks:
            axes.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, 1.0 + 0.55 / (1.0 + 0.34 * len(shown))),
                ncol=2,
                frameon=False,
            )
        return _svg(figure, "Attempts over time, with checkpoints and failures")


def bytes_text(num_bytes: int) -> str:
    """Return a size in the binary unit that gives one to four digits before the point."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def moment_text(seconds: float) -> str:
    """Return a Unix time as 2026-11-21 22:10 UTC, or a question mark if no calendar date has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return "?"


def _by_step(
    attempts: Sequence[AttemptHistory],
    name: str,
    *,
    value: Callable[[Point], float | None],
    low: Callable[[Point], float | None] | None = None,
    high: Callable[[Point], float | None] | None = None,
    may_be_log: bool = False,
) -> str | None:
    found = curves(attempts)
    values = [item for curve in found for point in curve.kept if (item := value(point)) is not None]
    if len(values) < 2:
        return None
    with _figure(name) as (figure, axes):
        for curve in found:
            _line(axes, curve.lost, value, COLOURS["lost"], dashed=True)
            if low is not None and high is not None:
                _band(axes, curve.kept, low, high)
        # One line over all attempts: each attempt begins where the part of the previous one that it built on
        # ends.
        _line(axes, [point for curve in found for point in curve.kept], value, COLOURS["line"])
        for curve, attempt in zip(found, attempts, strict=True):
            if attempt.record.resumed_from is not None and curve.kept:
                axes.axvline(attempt.record.resumed_from, color=COLOURS["grid"], linestyle=":", linewidth=1)
        positive = [item for item in values if item > 0]
        if may_be_log and len(positive) == len(values) and max(values) > 50 * min(values):
            axes.set_yscale("log")
            # The formatter of matplotlib writes labels as mathematics, which is off.
            axes.yaxis.set_major_formatter(lambda item, position: f"{item:g}")
            axes.yaxis.set_minor_formatter(lambda item, position: "")
        _labels(axes, "step", name)
        return _svg(figure, f"{name} against the step")


def _line(
    axes: Any,
    points: Sequence[Point],
    value: Callable[[Point], float | None],
    colour: str,
    *,
    dashed: bool = False,
) -> None:
    # NaN leaves a gap in the line, where a step had no finite value.
    pairs = [(point.step, math.nan if (item := value(point)) is None else item) for point in points]
    if pairs:
        steps, values = zip(*pairs, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.4, linestyle="--" if dashed else "-")


def _band(
    axes: Any,
    points: Sequence[Point],
    low: Callable[[Point], float | None],
    high: Callable[[Point], float | None],
) -> None:
    known = [(point.step, low(point), high(point)) for point in points]
    kept = [item for item in known if item[1] is not None and item[2] is not None]
    if kept:
        steps, lows, highs = zip(*kept, strict=True)
        axes.fill_between(steps, lows, highs, color=COLOURS["band"], alpha=0.5, linewidth=0)


@contextmanager
def _figure(salt: str, *, height: float = HEIGHT_IN) -> Iterator[tuple[Any, Any]]:
    import matplotlib as mpl

    mpl.use("svg", force=True)  # independent of a display and of the user's configuration
    from matplotlib.figure import Figure

    options: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"zerotrain-{salt}",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.parse_math": False,
        "text.color": COLOURS["text"],
        "axes.edgecolor": COLOURS["grid"],
        "axes.labelcolor": COLOURS["text"],
        "xtick.color": COLOURS["text"],
        "ytick.color": COLOURS["text"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "path.simplify": True,
    }
    with mpl.rc_context(options):
        figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=True, color=COLOURS["grid"], linewidth=0.5, alpha=0.6)
        axes.set_axisbelow(True)
        yield figure, axes


def _labels(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(one_line(x_label, 80))
    axes.set_ylabel(one_line(y_label, 40))


def _svg(figure: Any, title: str) -> str:
    """Return the `<svg>` element with the page's colours."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, stand_in in COLOURS.items():
        text = text.replace(stand_in, f"var(--{name})")
    # The page chooses the size. The title serves screen readers.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def _unit(seconds: float) -> tuple[float, str]:
    for length, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * length:
            return length, name
    return 1.0, "seconds"
