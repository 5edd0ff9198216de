"""Asking the workers to checkpoint and stop."""

from __future__ import annotations

import asyncio
import logging

from zerotrain.contract.channel_token import derive
from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import ChannelError, Worker
from zerotrain.operator.reconcile import RequestYield, YieldState

log = logging.getLogger(__name__)


async def request(hands: Hands, body: Json, action: RequestYield) -> None:
    """The answer, or why there is none, is in memory for the next pass; all that are asked must accept."""
    meta = body["metadata"]
    token = derive(hands.operator_key, meta["uid"], action.attempt)
    pods = ((action.pod, action.pod_ip), *action.others)
    asked = [
        _ask(hands, Worker(namespace=meta["namespace"], pod=pod, ip=ip), action.attempt, token)
        for pod, ip in pods
    ]
    errors = [error for error in await asyncio.gather(*asked) if error is not None]
    state = YieldState(attempt=action.attempt, acked_at=hands.api.time.now())
    if errors:
        refused = any(error.final for error in errors)
        state = YieldState(attempt=action.attempt, error=str(errors[0]), refused=refused)
    hands.memories.of(meta["uid"]).yielding = state


async def _ask(hands: Hands, worker: Worker, attempt: int, token: str) -> ChannelError | None:
    try:
        await hands.channel.request_yield(worker, attempt=attempt, token=token)
    except ChannelError as error:
        log.warning("asking %s to yield: %s", worker.pod, error)
        return error
    return None
