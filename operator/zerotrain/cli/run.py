"""`zerotrain run`: run a job file as local processes, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotrain.cli.errors import CliError, job_file_errors
from zerotrain.cli.options import ConfigOption

EXAMPLE = "Example: zerotrain run job.yaml --ranks 2"


def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="A ZeroTrainingJob, as for kubectl.")],
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoints, configuration and logs; runs/<name of the job> unless given."
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks; workers x ranksPerWorker of the job unless given."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(exists=True, help="File or folder to train on instead of the job's data.path."),
    ] = None,
    config: ConfigOption = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum number of restarts after failures; failurePolicy.maxRestarts unless given."
        ),
    ] = None,
) -> None:
    """Train a job on this machine. It restarts after failures and resumes from its last checkpoint, as in the
    cluster.

    Ctrl-C lets the job checkpoint and stop; the same command resumes it. The exit code is that of the job
    (zerotrain explain exit-codes).
    """
    # Imported late: the other commands need neither pydantic's models nor the runtime.
    from zerotrain.cli.local.attempts import run_attempts
    from zerotrain.client import LocalRunError, load_job, local_run

    try:
        with job_file_errors(job_file):
            plan = local_run(load_job(job_file), ranks=ranks, data=data, config=config)
    except LocalRunError as error:
        raise CliError(str(error), next_step=f"correct {job_file} and run the command again") from error
    folder = (run_dir or Path("runs", plan.name)).resolve()
    raise typer.Exit(run_attempts(plan, folder, max_restarts=max_restarts))
