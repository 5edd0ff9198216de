"""What programs on the user's side need: job files, the plan of a local run. Never imports the runtime."""

from .jobfile import JobFileError, Problem, load_job, parse_job
from .localrun import LocalRun, LocalRunError, local_run

__all__ = [
    "JobFileError",
    "LocalRun",
    "LocalRunError",
    "Problem",
    "load_job",
    "local_run",
    "parse_job",
]
