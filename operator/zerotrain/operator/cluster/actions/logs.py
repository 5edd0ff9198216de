"""Storage of the last lines of a rank that failed, before its pod is deleted."""

from __future__ import annotations

import logging

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.context import ActionContext, ActionRefused
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.errors import ApiError, Conflict, NotFound
from zerotrain.operator.cluster.logs import last_lines, read_tail
from zerotrain.operator.reconcile import LogView, SaveLog
from zerotrain.operator.resources.failures import failures_config_map, outdated_keys

log = logging.getLogger(__name__)


async def save(context: ActionContext, body: Json, action: SaveLog) -> None:
    """Read and store the log. A rejection is remembered as the outcome and delays nothing, and so is an
    answer that stays an error after all retries, such as that of a webhook that is down.

    An API server that does not answer at all raises ApiError: then nothing is deleted either.
    """
    job = ZeroTrainingJob.parse(body)
    text = await read_tail(context.api, namespace=job.namespace, pod=action.pod, container=action.container)
    kept = f"{action.title}\n{last_lines(text, action.rank)}"
    error = ""
    try:
        await _store(context, job, action.key, kept)
    except (ActionRefused, ApiError) as refusal:
        outcome = isinstance(refusal, (ActionRefused, NotFound, Conflict)) or refusal.is_refusal
        if not outcome:
            raise
        error = f"the last lines of {action.pod} were not kept: {refusal}"
        log.warning("%s/%s: %s", job.namespace, job.name, error)
    context.job_states.of(job.uid).log = LogView(attempt=action.attempt, error=error)


async def _store(context: ActionContext, job: ZeroTrainingJob, key: str, text: str) -> None:
    item = failures_config_map(job, {key: text})
    found = await context.find_or_make(job, item)
    if found is not None:
        old = outdated_keys(found.get("data") or {}, key)
        data = {key: text, **dict.fromkeys(old)}
        await context.merge(item, {"metadata": {"uid": found["metadata"]["uid"]}, "data": data})
