"""`zerotrain version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import typer

EXAMPLE = "Example: zerotrain version"


def version() -> None:
    """Print the versions that a bug report needs."""
    for name in ("zerotrain", "torch", "kopf", "kubernetes"):
        typer.echo(f"{name} {_installed(name)}")
    typer.echo(f"python {platform.python_version()}")


def _installed(distribution: str) -> str:
    """From the metadata: importing torch takes seconds."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return "not installed"
