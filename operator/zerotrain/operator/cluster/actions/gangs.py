"""Deletion of the pod groups (gangs) of attempts that are over."""

from __future__ import annotations

from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.api import Json
from zerotrain.operator.reconcile import ForgetGroup
from zerotrain.operator.resources.gang import RESOURCE, group_name


async def forget(context: ActionContext, body: Json, action: ForgetGroup) -> None:
    """Delete the group, unless the object of that name has another owner."""
    meta = body["metadata"]
    name = group_name(meta["name"], action.attempt)
    path = f"/apis/{action.gang}/namespaces/{meta['namespace']}/{RESOURCE}/{name}"
    await context.remove(path, kind=RESOURCE, job_uid=meta["uid"])
    context.job_states.of(meta["uid"]).ungrouped = action.attempt
