"""Reader of the StorageClass of volumes that must be encrypted, and of the claim that names it."""

from __future__ import annotations

from zerotrain.operator.cluster.actions.context import ActionContext
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.errors import Forbidden, NotFound
from zerotrain.operator.reconcile import AskStorageClass, StorageClassView
from zerotrain.operator.resources.storage_class import declared_encryption

PATH = "/apis/storage.k8s.io/v1/storageclasses"


async def read_class(context: ActionContext, body: Json, action: AskStorageClass) -> None:
    """Read the StorageClass into memory for the next pass. A rejection or a missing object is recorded as the
    result, too."""
    name, encryption, problem = action.name, None, None
    try:
        if action.claim:
            name = await _class_of_claim(context, body["metadata"]["namespace"], action.claim)
        if name:
            request = Request(method="GET", path=f"{PATH}/{name}", kind="storageclasses")
            encryption = declared_encryption(await context.api.call(request))
    except (Forbidden, NotFound) as error:
        problem = str(error)
    context.job_states.of(body["metadata"]["uid"]).storage_classes[action.field] = StorageClassView(
        field=action.field,
        claim=action.claim,
        name=name,
        at=context.api.time.now(),
        encryption=encryption,
        problem=problem,
    )


async def _class_of_claim(context: ActionContext, namespace: str, claim: str) -> str:
    """Return the StorageClass that the claim names; empty if it names none: then an administrator made its
    volume by hand. Everything else in the claim is set by a tenant and not trusted."""
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
    found = await context.api.call(Request(method="GET", path=path, kind="persistentvolumeclaims"))
    return str((found.get("spec") or {}).get("storageClassName") or "")
