"""Client library for users' programs: jobs in a cluster, job files, local runs. It never imports the runtime.

Names are imported at their first use: the models of a job take as long as a request to a cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Client
    from .config_source import ConfigSourceError
    from .errors import (
        CertificateError,
        ClientError,
        ConflictError,
        ForbiddenError,
        InvalidJobError,
        JobFailedError,
        JobNotFoundError,
        KubeconfigError,
        NoLogsError,
        NotFoundError,
        NotInstalledError,
        ServerError,
        TooManyLogsError,
        UnauthenticatedError,
        UnreachableError,
        WaitTimeoutError,
        WorkerError,
    )
    from .job import Job
    from .jobfile import JobFileError, Problem, load_job, parse_job
    from .localrun import LocalRun, LocalRunError, local_run
    from .observed import Event, JobProgress, LogLine, MetricFamily, Pod, Sample

_PLACES = {
    "cluster": ("Client",),
    "config_source": ("ConfigSourceError",),
    "job": ("Job",),
    "jobfile": ("JobFileError", "Problem", "load_job", "parse_job"),
    "localrun": ("LocalRun", "LocalRunError", "local_run"),
    "observed": ("Event", "JobProgress", "LogLine", "MetricFamily", "Pod", "Sample"),
}
"""Names by their module; `errors` has the others of `__all__`."""

__all__ = [
    "CertificateError",
    "Client",
    "ClientError",
    "ConfigSourceError",
    "ConflictError",
    "Event",
    "ForbiddenError",
    "InvalidJobError",
    "Job",
    "JobFailedError",
    "JobFileError",
    "JobNotFoundError",
    "JobProgress",
    "KubeconfigError",
    "LocalRun",
    "LocalRunError",
    "LogLine",
    "MetricFamily",
    "NoLogsError",
    "NotFoundError",
    "NotInstalledError",
    "Pod",
    "Problem",
    "Sample",
    "ServerError",
    "TooManyLogsError",
    "UnauthenticatedError",
    "UnreachableError",
    "WaitTimeoutError",
    "WorkerError",
    "load_job",
    "local_run",
    "parse_job",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _PLACES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{module}"), name)
