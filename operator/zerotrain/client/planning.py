"""Whether a job fits, asked before it is submitted: the operator's plan. No cluster is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.client.jobfile import load_job, parse_job
from zerotrain.operator.api.admission import refusals
from zerotrain.operator.api.planning import JobPlan, plan_job


def plan(job: Mapping[str, Any] | Path | str, *, workers: int | None = None) -> JobPlan:
    """Of an object or of a file; of another number of workers where it is given.

    Raises JobFileError for a job that the operator would refuse. A job that does not fit is an answer: its
    `verdict` is DOES_NOT_FIT and `proposal` the nearest that does.
    """
    if isinstance(job, Mapping):
        file = parse_job(json.dumps(job), source="job")
    else:
        file = load_job(Path(job))
    spec = file.job.spec
    if problems := [(item.path, item.message) for item in refusals(spec)]:
        raise file.error(problems)
    base = spec.workers if spec.elastic is not None else None
    return plan_job(spec, workers=workers, base_workers=base)
