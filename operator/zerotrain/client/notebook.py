"""HTML view of a job in a notebook: a small table. Everything in it is escaped, as it may be hostile."""

from __future__ import annotations

from html import escape

from zerotrain.client.job import Job
from zerotrain.contract.text import one_line

_COLOURS = {"Completed": "#2e7d32", "Running": "#1565c0", "Failed": "#c62828", "Stalled": "#c62828"}
_STYLE = "border-collapse:collapse;font-family:sans-serif;font-size:13px"


def job_html(job: Job) -> str:
    """Return the HTML of `Job._repr_html_`."""
    colour = _COLOURS.get(job.phase, "#6d4c41")
    rows = "".join(
        f'<tr><th style="text-align:left;padding:2px 12px 2px 0">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in _facts(job)
        if value
    )
    bar = _bar(job, colour)
    title = f'<b>{escape(job.reference)}</b> <span style="color:{colour}">{escape(job.phase or "new")}</span>'
    return f'<div style="{_STYLE}">{title}{bar}<table style="{_STYLE}">{rows}</table></div>'


def _facts(job: Job) -> list[tuple[str, str]]:
    failure = job.failures[0] if job.failures else None
    last = job.last_checkpoint
    return [
        ("step", f"{job.step}" + (f" of {job.total_steps}" if job.total_steps else "")),
        ("loss", f"{job.loss:.4f}" if job.loss is not None else ""),
        ("tokens/s", f"{job.tokens_per_second:,.0f}" if job.tokens_per_second else ""),
        ("attempt", str(job.attempt) if job.attempt else ""),
        ("ranks", f"{job.ranks.ready} of {job.ranks.desired} ready" if job.ranks.desired else ""),
        ("checkpoint", f"step {last.step} in {one_line(last.path, 200)}" if last is not None else ""),
        ("restarts", str(job.restarts.total) if job.restarts.total else ""),
        ("last failure", f"{failure.reason}: {one_line(failure.message, 200)}" if failure else ""),
    ]


def _bar(job: Job, colour: str) -> str:
    if not job.total_steps:
        return ""
    percent = min(100.0, 100.0 * job.step / job.total_steps)
    return (
        '<div style="background:#e0e0e0;width:320px;height:6px;margin:4px 0">'
        f'<div style="background:{colour};width:{percent:.1f}%;height:6px"></div></div>'
    )
