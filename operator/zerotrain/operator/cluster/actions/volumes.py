"""Reading the StorageClass of volumes that must be encrypted."""

from __future__ import annotations

from zerotrain.operator.cluster.actions.hands import Hands
from zerotrain.operator.cluster.api import Json, Request
from zerotrain.operator.cluster.errors import Forbidden, NotFound
from zerotrain.operator.reconcile import AskStorageClass, StorageClassView
from zerotrain.operator.resources.storage_class import declared_encryption

PATH = "/apis/storage.k8s.io/v1/storageclasses"


async def read_class(hands: Hands, body: Json, action: AskStorageClass) -> None:
    """The answer is in memory for the next pass; a refusal and a class that is missing are answers, too."""
    request = Request(method="GET", path=f"{PATH}/{action.name}", kind="storageclasses")
    encryption = problem = None
    try:
        encryption = declared_encryption(await hands.api.call(request))
    except (Forbidden, NotFound) as error:
        problem = str(error)
    memory = hands.memories.of(body["metadata"]["uid"])
    memory.storage_class = StorageClassView(
        name=action.name, at=hands.api.time.now(), encryption=encryption, problem=problem
    )
