"""Registration of the commands about jobs in a cluster. `main` calls it once."""

from __future__ import annotations

import typer

from zerotrain.cli import describe, get, lifecycle, logs, submit, top

PANEL = "Jobs in a cluster"


def register(app: typer.Typer) -> None:
    """Add each command with its example, in the order of a job's life."""
    for name, example, command in (
        ("submit", submit.EXAMPLE, submit.submit),
        ("get", get.EXAMPLE, get.get),
        ("describe", describe.EXAMPLE, describe.describe),
        ("logs", logs.EXAMPLE, logs.logs),
        ("top", top.EXAMPLE, top.top),
        ("wait", lifecycle.WAIT_EXAMPLE, lifecycle.wait),
        ("suspend", lifecycle.SUSPEND_EXAMPLE, lifecycle.suspend),
        ("resume", lifecycle.RESUME_EXAMPLE, lifecycle.resume),
        ("scale", lifecycle.SCALE_EXAMPLE, lifecycle.scale),
        ("delete", lifecycle.DELETE_EXAMPLE, lifecycle.delete),
    ):
        app.command(name, epilog=example, rich_help_panel=PANEL)(command)
