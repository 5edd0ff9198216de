"""`zerotrain report`: the course of a run, as one HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli.errors import CliError
from zerotrain.cli.options import Target, cluster_command, complete_jobs
from zerotrain.cli.output import show

EXAMPLE = "Example: zerotrain report runs/gpt --file report.html"


@cluster_command
def report(
    target: Target,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="JOB|FOLDER",
            help="A job in the cluster, the folder of a local run, or a checkpoint folder.",
            autocompletion=complete_jobs,
        ),
    ],
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="File to write; <name>-report.html unless given.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Checkpoint folder of a job in the cluster, if its volume is mounted here. It gives the "
            "curves after the pods are deleted.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run: loss, gradient norm, the parts of a step's time, memory
    against plan, restarts on the time line, checkpoints.

    If a folder has the given name, the command reports on the folder.
    """
    _need("matplotlib", "jinja2")
    from zerotrain.cli.report.cluster import of_job
    from zerotrain.cli.report.folders import of_folder
    from zerotrain.cli.report.page import render

    folder = Path(subject)
    if folder.is_dir():
        found = of_folder(folder.resolve())
    elif os.sep in subject:
        raise CliError(
            f"there is no folder {subject}",
            next_step="give the folder of a run, one with checkpoints, or a job (zerotrain get)",
        )
    else:
        found = of_job(target.client, subject, history_folder=history)
    place = file or Path(f"{_file_name(found.name)}-report.html")
    _write(place, render(found))
    show(f"{place}: {found.state.lower()}; open it in a browser")


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}", next_step="give another --file") from error


def _file_name(name: str) -> str:
    """Turn a job's name into a file name: the name in a folder may be any text that its author wrote."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in name)
    return kept.strip("-")[:64] or "job"


def _need(*modules: str) -> None:
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise CliError(
            f"this command needs {', '.join(missing)}, which is not installed",
            next_step="pip install zerotrain[cli]",
        )
