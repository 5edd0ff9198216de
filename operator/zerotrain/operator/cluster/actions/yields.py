"""Asking the workers to checkpoint and stop."""

from __future__ import annotations

import logging

from zerotrain.contract.channel_token import derive
from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import ChannelError, Worker
from zerotrain.operator.reconcile import RequestYield, YieldState

log = logging.getLogger(__name__)


async def request(hands: Hands, body: Json, action: RequestYield) -> None:
    """The answer, or why there is none, is in memory for the next pass; that of the first pod counts."""
    meta = body["metadata"]
    first, *others = (
        Worker(namespace=meta["namespace"], pod=pod, ip=ip)
        for pod, ip in ((action.pod, action.pod_ip), *action.others)
    )
    token = derive(hands.operator_key, meta["uid"], action.attempt)
    state = YieldState(attempt=action.attempt, acked_at=hands.api.time.now())
    asked = [
        hands.channel.request_yield(worker, attempt=action.attempt, token=token) for worker in (first, *others)
    ]
    error, *missed = await asyncio.gather(*asked, return_exceptions=True)
        log.warning("asking %s to yield: %s", action.pod, error)
        state = YieldState(attempt=action.attempt, error=str(error), refused=error.final)
    hands.memories.of(meta["uid"]).yielding = state
