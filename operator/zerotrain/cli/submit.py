"""`zerotrain submit`: create a job in the cluster from a job file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerotrain.cli.errors import job_file_errors
from zerotrain.cli.lifecycle import TimeoutOption, WaitOption, wait_until
from zerotrain.cli.options import (
    DryRun,
    DryRunOption,
    Format,
    FormatOption,
    Target,
    cluster_command,
    usage_error,
)
from zerotrain.cli.output import object_name, print_message, print_objects, show

if TYPE_CHECKING:
    from zerotrain.client.jobfile import JobFile

EXAMPLE = "Example: zerotrain submit job.yaml --wait"


@cluster_command
def submit(
    target: Target,
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="A ZeroTrainingJob, as for kubectl.")],
    name: Annotated[str | None, typer.Option(help="Name of the job; that in the file unless given.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the spec of the job if it exists.")
    ] = False,
    dry_run: DryRunOption = DryRun.NONE,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check a job file by all rules of the cluster, and create its job.

    With --wait the command waits until the job is complete; the exit code shows how the job ended. `zerotrain
    plan` shows whether a job fits and what it costs.
    """
    if wait and dry_run is not DryRun.NONE:
        raise usage_error("--wait does not go with --dry-run: nothing will run")
    file = _load(job_file)
    raw = _named(file, name, target)
    from zerotrain.client.job import command

    target = dataclasses.replace(target, namespace=raw["metadata"].get("namespace") or target.namespace)
    if dry_run is DryRun.CLIENT:
        _print(raw, output, "is valid by all rules that can be checked here")
        return
    exists = replace and _exists(target, raw["metadata"]["name"])
    created = target.client.submit(raw, dry_run=dry_run is DryRun.SERVER, replace=replace)
    done = "changed" if exists else "created"
    _print(created.raw, output, f"{done} (server dry run)" if dry_run is DryRun.SERVER else done)
    if dry_run is DryRun.NONE and output is Format.TABLE:
        _mention_others(file)
        print_message(f"next: {command(created, 'describe')}; {command(created, 'logs', '-f')}")
    if wait:
        wait_until(target, created.name, "complete", timeout)


def _load(job_file: Path) -> JobFile:
    from zerotrain.client.jobfile import load_job

    with job_file_errors(job_file):
        file = load_job(job_file)
        file.check()
        return file


def _exists(target: Target, name: str) -> bool:
    from zerotrain.client.errors import JobNotFoundError

    try:
        target.client.get(name)
    except JobNotFoundError:
        return False
    return True


def _named(file: JobFile, name: str | None, target: Target) -> dict[str, Any]:
    """Return the object with the requested name. Raises CliError if the file and --namespace disagree."""
    raw: dict[str, Any] = dict(file.document.value)
    meta = dict(raw["metadata"])
    if name is not None:
        meta["name"] = name
    own = meta.get("namespace")
    if own and target.namespace and own != target.namespace:
        raise usage_error(
            f"{file.source} has namespace {own}, and --namespace is {target.namespace}",
            "leave one of them out",
        )
    return {**raw, "metadata": meta}


def _print(raw: Any, output: Format, done: str) -> None:
    if output in (Format.TABLE, Format.WIDE):
        show(f"{object_name(raw)} {done}")
    else:
        print_objects([raw], output, is_list=False)


def _mention_others(file: JobFile) -> None:
    """Tell the user to create other objects of the file, such as a claim or a ConfigMap, with kubectl."""
    if (others := len(file.others)) > 0:
        print_message(
            f"the file has {others} more objects, which were not created: kubectl apply -f {file.source}"
        )
