"""`zerotrain suspend|resume|scale|delete|wait`: what is done to a job that exists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from zerotrain.cli.options import (
    DryRun,
    DryRunOption,
    JobArgument,
    Target,
    cluster_command,
    complete_jobs,
)
from zerotrain.cli.output import on_terminal, say, show

if TYPE_CHECKING:
    from zerotrain.client import Job

SUSPEND_EXAMPLE = "Example: zerotrain suspend gpt --wait"
RESUME_EXAMPLE = "Example: zerotrain resume gpt"
SCALE_EXAMPLE = "Example: zerotrain scale gpt --workers 4"
DELETE_EXAMPLE = "Example: zerotrain delete gpt --wait"
WAIT_EXAMPLE = "Example: zerotrain wait gpt --for complete --timeout 3600"

POLL_S = 1.0

WaitOption = Annotated[bool, typer.Option("--wait", help="Go on until it is done.")]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0, help="Seconds to wait at most; without end unless given.")
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
) -> None:
    """Let all ranks checkpoint at one step and stop. The job holds nothing until it is resumed."""
    if _already(target, job, "Suspended", dry_run):
        show(f"{job} is suspended already")
        return
    _change(target, job, {"suspend": True}, dry_run, "suspending: its ranks checkpoint and stop")
    if wait and dry_run is DryRun.NONE:
        found = wait_until(target, job, "suspended", timeout)
        last = found.last_checkpoint
        show(f"{job} is suspended" + (f"; it resumes from step {last.step}" if last is not None else ""))


@cluster_command
def resume(
    target: Target,
    job: JobArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    dry_run: DryRunOption = DryRun.NONE,
) -> None:
    """Go on with a suspended job from its newest durable checkpoint; with --wait until it trains."""
    found = _change(target, job, {"suspend": False}, dry_run, "resumes")
    if found.is_finished:
        say(f"{job} is {found.phase}: there is nothing to resume")
    elif wait and dry_run is DryRun.NONE:
        wait_until(target, job, "running", timeout)
        show(f"{job} is running")


@cluster_command
def scale(
    target: Target,
    job: JobArgument,
    workers: Annotated[int, typer.Option("--workers", "--replicas", min=1, help="How many workers.")],
    dry_run: DryRunOption = DryRun.NONE,
) -> None:
    """Give a job with spec.elastic another number of workers: a checkpoint, then another attempt.

    The global batch stays what it is. The job grows when the cluster has room for it.
    """
    _change(target, job, {"workers": workers}, dry_run, f"asks for {workers} workers now")


@cluster_command
def delete(
    target: Target,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", autocompletion=complete_jobs)],
    wait: Annotated[bool, typer.Option("--wait", help="Go on until all pods are gone.")] = False,
    timeout: TimeoutOption = None,
    dry_run: DryRunOption = DryRun.NONE,
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="A job that is not there is no error.")
    ] = False,
) -> None:
    """Delete jobs with everything they own: pods, Services, kept logs. Checkpoints stay on their volume.

    To stop a job that you will want again, suspend it.
    """
    from zerotrain.client.errors import JobNotFoundError

    for name in jobs:
        try:
            target.client.get(name)
            if dry_run is DryRun.NONE:
                target.client.delete(name)
        except JobNotFoundError:
            if not ignore_not_found:
                raise
            continue
        show(f"{name} deleted" + (f" ({dry_run} dry run)" if dry_run is not DryRun.NONE else ""))
    if wait and dry_run is DryRun.NONE:
        _wait_for_pods(target, jobs, timeout)


@cluster_command
def wait(
    target: Target, job: JobArgument, goal: ForOption = "complete", timeout: TimeoutOption = None
) -> None:
    """Wait until a job is where you want it.

    Ends with 0 then, with 78 after the timeout, with 79 when the job ended otherwise
    or waits for its spec to be corrected.
    """
    found = wait_until(target, job, goal, timeout)
    show(f"{job} is {found.phase if goal != 'deleted' else 'deleted'} at step {found.step}")


def wait_until(target: Target, job: str, goal: str, timeout_s: float | None) -> Job:
    """Wait, and on a terminal say how far the job is."""
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


def _already(target: Target, job: str, phase: str, dry_run: DryRun) -> bool:
    return dry_run is DryRun.NONE and (found := target.client.get(job)).phase == phase and found.suspended


def _change(target: Target, job: str, spec: dict[str, object], dry_run: DryRun, done: str) -> Job:
    """Merge into the spec; a dry run of the client only looks whether the job is there."""
    client = target.client
    if dry_run is DryRun.CLIENT:
        found = client.get(job)
    else:
        found = client.patch(job, {"spec": spec}, dry_run=dry_run is DryRun.SERVER)
    show(f"{job} {done}" + (f" ({dry_run} dry run)" if dry_run is not DryRun.NONE else ""))
    return found


def _wait_for_pods(target: Target, jobs: list[str], timeout_s: float | None) -> None:
    from zerotrain.client.errors import WaitTimeoutError

    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    while any(target.client.pods(name) for name in jobs):
        if deadline is not None and time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"pods are left after {timeout_s:g} s", next_step=f"zerotrain get {' '.join(jobs)}"
            )
        time.sleep(POLL_S)
