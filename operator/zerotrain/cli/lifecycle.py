"""`zerotrain suspend|resume|scale|delete|wait`: operations on an existing job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.options import (
    DryRun,
    DryRunOption,
    Format,
    FormatOption,
    JobArgument,
    Target,
    cluster_command,
    complete_jobs,
)
from zerotrain.cli.output import on_terminal, print_message, print_objects, show

if TYPE_CHECKING:
    from zerotrain.client import Job

SUSPEND_EXAMPLE = "Example: zerotrain suspend gpt --wait"
RESUME_EXAMPLE = "Example: zerotrain resume gpt"
SCALE_EXAMPLE = "Example: zerotrain scale gpt --workers 4"
DELETE_EXAMPLE = "Example: zerotrain delete gpt --wait"
WAIT_EXAMPLE = "Example: zerotrain wait gpt --for complete --timeout 3600"

POLL_S = 1.0

WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until it is done.")]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0, help="Maximum seconds to wait; no limit unless given.")
]
ForOption = Annotated[
    str,
    typer.Option(
        "--for",
        help="complete, failed, finished, running, suspended, deleted, step=N, or a condition TYPE[=STATUS].",
    ),
]


@cluster_command
def suspend(
    target: Target,
    job: JobArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    dry_run: DryRunOption = DryRun.NONE,
    output: FormatOption = Format.TABLE,
) -> None:
    """Suspend a job: all ranks checkpoint at one step and stop. The job holds no resources until you resume
    it."""
    found = target.client.get(job)
    if found.is_finished:
        print_message(f"{job} is {found.phase}: there is nothing to suspend")
        _print_result(found, output, "", dry_run)
        return
    if found.suspended and found.phase == "Suspended":
        _print_result(found, output, f"{job} is suspended already", DryRun.NONE)
        return
    found = _change(target, found, {"suspend": True}, dry_run)
    _print_result(found, output, f"{job} suspending: its ranks checkpoint and stop", dry_run)
    if wait and dry_run is DryRun.NONE:
        last = wait_until(target, job, "suspended", timeout).last_checkpoint
        step = f"; it resumes from step {last.step}" if last is not None else ""
        _afterwards(output, f"{job} is suspended{step}")


@cluster_command
def resume(
    target: Target,
    job: JobArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    dry_run: DryRunOption = DryRun.NONE,
    output: FormatOption = Format.TABLE,
) -> None:
    """Resume a suspended job from its newest durable checkpoint; with --wait, wait until it trains."""
    found = target.client.get(job)
    if found.is_finished:
        print_message(f"{job} is {found.phase}: there is nothing to resume")
        _print_result(found, output, "", dry_run)
        return
    found = _change(target, found, {"suspend": False}, dry_run)
    _print_result(found, output, f"{job} resumes", dry_run)
    if wait and dry_run is DryRun.NONE:
        wait_until(target, job, "running", timeout)
        _afterwards(output, f"{job} is running")


@cluster_command
def scale(
    target: Target,
    job: JobArgument,
    workers: Annotated[int, typer.Option("--workers", "--replicas", min=1, help="Number of workers.")],
    dry_run: DryRunOption = DryRun.NONE,
    output: FormatOption = Format.TABLE,
) -> None:
    """Change the number of workers of a job with spec.elastic, by a checkpoint and another attempt.

    The global batch stays the same. The job grows when the cluster has the capacity.
    """
    found = _change(target, target.client.get(job), {"workers": workers}, dry_run)
    _print_result(found, output, f"{job} requests {workers} workers now", dry_run)


@cluster_command
def delete(
    target: Target,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete_jobs)],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all pods are deleted.")] = False,
    timeout: TimeoutOption = None,
    dry_run: DryRunOption = DryRun.NONE,
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="Accept jobs that do not exist.")
    ] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Delete jobs with everything they own: pods, Services, kept logs. Checkpoints stay on their volume.

    To stop a job that you will need again, suspend it.
    """
    from zerotrain.client.errors import JobNotFoundError

    for name in jobs:
        try:
            found = target.client.get(name)
            if dry_run is not DryRun.CLIENT:
                target.client.delete(name, dry_run=dry_run is DryRun.SERVER)
        except JobNotFoundError:
            if not ignore_not_found:
                raise
            continue
        _print_result(found, output, f"{name} deleted", dry_run)
    if wait and dry_run is DryRun.NONE:
        _wait_for_pods(target, jobs, timeout)


@cluster_command
def wait(
    target: Target,
    job: JobArgument,
    goal: ForOption = "complete",
    timeout: TimeoutOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Wait until a condition of a job holds.

    The exit code is 0 if it holds, 78 after the timeout, and 79 if the job ended otherwise or waits until its
    spec is corrected.
    """
    found = wait_until(target, job, goal, timeout)
    where = f"{job} is {found.phase if goal != 'deleted' else 'deleted'} at step {found.step}"
    _print_result(found, output, where, DryRun.NONE)


def wait_until(target: Target, job: str, goal: str, timeout_s: float | None) -> Job:
    """Wait until the job reaches `goal`, and show its progress on a terminal."""
    from zerotrain.client.waiting import wait_for

    client = target.client
    client.get(job)
    states = client.watch(job, timeout_s=timeout_s)
    if not on_terminal():
        return wait_for(states, job, until=goal, timeout_s=timeout_s)
    from rich.console import Console

    with Console(stderr=True).status(f"waiting for {job} to be {goal}", spinner="dots") as status:

        def shown() -> Iterator[Job | None]:
            for state in states:
                if state is not None:
                    status.update(f"{job}: {state.phase or 'new'}, step {state.step} (waiting for {goal})")
                yield state

        return wait_for(shown(), job, until=goal, timeout_s=timeout_s)


def _change(target: Target, job: Job, spec: dict[str, object], dry_run: DryRun) -> Job:
    """Merge `spec` into the job's spec. A client dry run checks it by the rules that are known locally."""
    if dry_run is DryRun.CLIENT:
        return _checked_locally(job, spec)
    return target.client.patch(job.name, {"spec": spec}, dry_run=dry_run is DryRun.SERVER)


def _checked_locally(job: Job, spec: dict[str, object]) -> Job:
    """Return the job with the changed spec, checked locally. Raises InvalidJobError."""
    from zerotrain.client import Job, JobFileError, parse_job
    from zerotrain.client.errors import InvalidJobError

    if spec.get("workers", job.spec.get("workers")) != job.spec.get("workers") and "elastic" not in job.spec:
        raise InvalidJobError(
            "spec.workers: workers is immutable unless elastic is given",
            next_step="suspend the job and give it spec.elastic, or make a new job",
        )
    raw = {**job.raw, "spec": {**job.spec, **spec}}
    try:
        parse_job(json.dumps({**raw, "metadata": {"name": job.name}, "status": {}}), source=job.name)
    except JobFileError as error:
        raise InvalidJobError(str(error), next_step="correct what the message names") from error
    return Job.of(raw)


def _print_result(job: Job, output: Format, text: str, dry_run: DryRun) -> None:
    """Print a sentence about what was done, or the object for another program."""
    if output not in (Format.TABLE, Format.WIDE):
        print_objects([job.raw], output, is_list=False)
    elif text:
        show(text + (f" ({dry_run} dry run)" if dry_run is not DryRun.NONE else ""))


def _afterwards(output: Format, text: str) -> None:
    """Print a later message: on standard error if the result was an object for another program."""
    (show if output in (Format.TABLE, Format.WIDE) else print_message)(text)


def _wait_for_pods(target: Target, jobs: list[str], timeout_s: float | None) -> None:
    from zerotrain.client.errors import WaitTimeoutError

    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    while any(target.client.pods(name) for name in jobs):
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"pods are left after {timeout_s:g} s", next_step=f"zerotrain get {' '.join(jobs)}"
            )
        time.sleep(POLL_S)
