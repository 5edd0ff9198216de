"""Discovery of the gang schedulers and queues that the API server serves, with their versions, when a job
wants one."""

from __future__ import annotations

from collections.abc import Sequence

from zerotrain.operator.cluster.api import Api, Request
from zerotrain.operator.cluster.errors import NotFound
from zerotrain.operator.reconcile.observe import ClusterApis
from zerotrain.operator.resources.gang import GROUPS, RESOURCE, VERSIONS
from zerotrain.operator.resources.kueue import KUEUE_GROUP, KUEUE_VERSIONS


async def discover(api: Api) -> ClusterApis:
    """Return the gang schedulers and the Kueue version that the cluster serves. Raises ApiError."""
    gangs = {}
    for gang, group in GROUPS.items():
        found = await _first_served(api, group, VERSIONS[gang], RESOURCE)
        if found is not None:
            gangs[gang] = found
    kueue = await _first_served(api, KUEUE_GROUP, KUEUE_VERSIONS, "workloads")
    return ClusterApis(at=api.time.now(), gangs=gangs, kueue=kueue)


async def _first_served(api: Api, group: str, versions: Sequence[str], resource: str) -> str | None:
    """Return the first of `versions` that the cluster serves with the resource; None if there is none."""
    served = {item["version"] for item in (await _get(api, f"/apis/{group}")).get("versions", ())}
    for version in versions:
        name = f"{group}/{version}"
        if version not in served:
            continue
        listed = await _get(api, f"/apis/{name}")
        if any(item["name"] == resource for item in listed.get("resources", ())):
            return name
    return None


async def _get(api: Api, path: str) -> dict[str, list[dict[str, str]]]:
    try:
        return await api.call(Request(method="GET", path=path, kind="discovery"))
    except NotFound:
        return {}
