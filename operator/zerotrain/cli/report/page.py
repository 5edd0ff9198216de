"""The page: one HTML file without external resources or scripts. Every text on it is escaped."""

from __future__ import annotations

import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerotrain.cli.report import charts
from zerotrain.cli.report.facts import Report
from zerotrain.contract.text import printable_lines

TEMPLATE = "page.html.j2"
MAX_TEXT_CHARS = 4000


def render(report: Report, *, now: float | None = None) -> str:
    """Return the whole document."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    environment.filters["size"] = lambda size: "" if size is None else charts.bytes_text(size)
    environment.filters["moment"] = lambda at: "" if at is None else charts.moment_text(at)
    environment.filters["seconds"] = lambda value: "" if value is None else f"{value:.3g} s"
    drawn = [
        (title, text, Markup(svg))  # the product's own drawing; matplotlib escapes its labels
        for title, text, svg in _charts(report)
        if svg is not None
    ]
    return environment.get_template(TEMPLATE).render(
        report=report, charts=drawn, made=charts.moment_text(time.time() if now is None else now)
    )


def clean(value: object) -> str:
    """Return a text without control and bidirectional characters, of at most MAX_TEXT_CHARS characters."""
    lines = printable_lines(str(value)[: MAX_TEXT_CHARS + 1])
    text = "\n".join(lines)
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]} ..."


def _charts(report: Report) -> list[tuple[str, str, str | None]]:
    attempts = report.attempts
    return [
        (
            "Time line",
            "Bars are attempts, ticks are checkpoints.",
            charts.timeline(report.spans, report.marks),
        ),
        (
            "Loss",
            "Mean over all ranks; where steps are merged, the band is the smallest to the largest. Dashed: "
            "steps that a later attempt did again. Dotted: where an attempt resumed.",
            charts.loss(attempts),
        ),
        ("Gradient norm", "Before clipping; the band is the largest.", charts.grad_norm(attempts)),
        (
            "Step time",
            "Mean seconds of a step by phase, on rank 0. Data is waiting for the next batch; other is what "
            "no phase accounts for.",
            charts.step_time(attempts),
        ),
        ("Throughput", "Tokens a second, all ranks together.", charts.throughput(attempts)),
        (
            "MFU",
            "Operations of the model by formula, without recomputation, as a part of the devices' peak.",
            charts.utilisation(attempts),
        ),
        ("Learning rate", "Of the first parameter group.", charts.learning_rate(attempts)),
        (
            "Memory against plan",
            "Peaks of one rank. The engine's buffers are held to its byte formulas; a whole plan also counts "
            "activations and what libraries take.",
            charts.memory(report.memory),
        ),
    ]
