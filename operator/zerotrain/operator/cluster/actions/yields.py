"""Asking the workers to checkpoint and stop."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from zerotrain.contract.channel_token import derive
from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.cluster.channel import ChannelError, Worker
from zerotrain.operator.reconcile import RequestYield, YieldState

log = logging.getLogger(__name__)


async def request(hands: Hands, body: Json, action: RequestYield) -> None:
    """The answer, or why there is none, is in memory for the next pass."""
    meta = body["metadata"]
    worker = Worker(namespace=meta["namespace"], pod=action.pod, ip=action.pod_ip)
    token = derive(hands.operator_key, meta["uid"], action.attempt)
    state = YieldState(attempt=action.attempt, acked_at=datetime.now(UTC))
    try:
        await hands.channel.request_yield(worker, attempt=action.attempt, token=token)
    except ChannelError as error:
        log.warning("asking %s to yield: %s", action.pod, error)
        state = YieldState(attempt=action.attempt, error=str(error), refused=error.final)
    hands.memories.of(meta["uid"]).yielding = state
