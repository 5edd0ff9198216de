"""Requests to the workers to checkpoint and stop."""

from __future__ import annotations

import logging
import time

from zerotrain.contract.channel_token import derive
from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import CallKind, ChannelError, Worker, share_of
from zerotrain.operator.cluster.worker_poller import call_concurrently
from zerotrain.operator.reconcile import RequestYield, YieldState

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds after which an error ends the requests: as long as one call may take."""


async def request(context: ActionContext, body: Json, action: RequestYield) -> None:
    """Request a yield of all workers, and keep the answer, or why there is none, in memory for the next pass.

    All workers must accept. One that does not accept is no reason to leave out the others: ranks that were
    asked would leave those that were not. But a pass must not wait for a thousand workers that are cut off.
    """
    begun = time.monotonic()
    meta = body["metadata"]
    token = derive(context.operator_key, meta["uid"], action.attempt)
    pods = ((action.pod, action.pod_ip), *action.others)
    answers = await call_concurrently(
        lambda worker: _ask(context, worker, action.attempt, token),
        [Worker(namespace=meta["namespace"], pod=pod, ip=ip) for pod, ip in pods],
        most=share_of(CallKind.YIELD),
        enough=lambda error: error is not None and time.monotonic() - begun >= PATIENCE_S,
    )
    errors = [error for error in answers.values() if error is not None]
    state = YieldState(attempt=action.attempt, acked_at=context.api.time.now())
    if errors:
        refused = any(error.final for error in errors)
        state = YieldState(attempt=action.attempt, error=str(errors[0]), refused=refused)
    context.job_states.of(meta["uid"]).yielding = state


async def _ask(context: ActionContext, worker: Worker, attempt: int, token: str) -> ChannelError | None:
    try:
        await context.channel.request_yield(worker, attempt=attempt, token=token)
    except ChannelError as error:
        log.warning("cannot request a yield from %s: %s", worker.pod, error)
        return error
    return None
