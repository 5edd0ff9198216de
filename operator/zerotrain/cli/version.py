"""`zerotrain version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from zerotrain.cli.options import Output, OutputOption
from zerotrain.cli.output import show, show_record

EXAMPLE = "Example: zerotrain version"


def version(output: OutputOption = Output.TABLE) -> None:
    """Print the versions of zerotrain and of the packages that a bug report needs."""
    found = {name: _installed(name) for name in ("zerotrain", "torch", "kopf", "kubernetes")}
    found["python"] = platform.python_version()
    if output is not Output.TABLE:
        show_record(found, output)
        return
    for name, text in found.items():
        show(f"{name} {text}")


def _installed(distribution: str) -> str:
    """Return the version from the metadata: importing torch takes seconds."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return "not installed"
