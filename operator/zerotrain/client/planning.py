"""Plan of a job before it is submitted, as the operator makes it: whether the job fits. No cluster is
needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotrain.client.config_source import ConfigMissingError, inlined
from zerotrain.client.jobfile import load_job, parse_job
from zerotrain.operator.api.planning import JobPlan, plan_job


def plan(
    job: Mapping[str, Any] | Path | str, *, workers: int | None = None, config: Path | str | None = None
) -> JobPlan:
    """Return the plan of a job, given as an object or a file, with another number of workers if `workers` is
    given.

    `config`: the JSON file of the ConfigMap that spec.configFrom names. Without it, the ConfigMap in the
    job's file is used; if there is none, the `verdict` is UNKNOWN, as the operator's.

    Raises JobFileError for a job that the operator would reject, ConfigSourceError for a configuration that
    cannot be read. A job that does not fit raises nothing: its `verdict` is DOES_NOT_FIT and `proposal` is
    the nearest configuration that fits.
    """
    if isinstance(job, Mapping):
        file = parse_job(json.dumps(job), source="job")
    else:
        file = load_job(Path(job))
    with suppress(ConfigMissingError):
        file = inlined(file, None if config is None else Path(config))
    file.check()
    spec = file.job.spec
    base = spec.workers if spec.elastic is not None else None
    return plan_job(spec, workers=workers, base_workers=base)
