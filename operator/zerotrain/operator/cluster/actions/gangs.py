"""Pod groups of attempts that are over: nobody else takes them away before the job goes."""

from __future__ import annotations

import logging

from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Request
from zerotrain.operator.cluster.errors import NotFound
from zerotrain.operator.resources.gang import group_name, group_resource

log = logging.getLogger(__name__)


async def forget(hands: Hands, job: ZeroTrainingJob, attempt: int) -> None:
    """Delete the group of an earlier attempt, if the gang of the current one is a scheduler's."""
    resource = group_resource(job.shape.gang)
    if resource is None:
        return
    name = group_name(job.name, attempt)
    path = f"/apis/{job.shape.gang}/namespaces/{job.namespace}/{resource}/{name}"
    try:
        await hands.api.call(Request(method="DELETE", path=path, kind=resource))
    except NotFound:
        log.debug("pod group %s is gone already", name)
