"""Programs on which jobs depend beside the operator: a queue that admits, and pods that read checkpoints.

They work in spite of all faults and until the end: jobs that wait for them must get what they need.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

from tests.cluster.chaos.invariants import is_true
from tests.support.kube_json import KubeJson
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.constants import LABEL_HELPER
from zerotrain.operator.resources.verification import HELPER

Json = dict[str, Any]

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
FLAVOR = "chaos"

CODES = (0, 0, 0, ExitCode.CHECKPOINT_UNUSABLE, 1, ExitCode.STORAGE_FAILED)
"""Exit codes of pods that verify: mostly success, else damage, or ends unrelated to the checkpoint."""


class Queue:
    """A script in place of Kueue.

    It admits the Workloads of one namespace with delay, and evicts them on request.
    """

    def __init__(self, api: KubeJson, namespace: str, chance: random.Random) -> None:
        self._api, self._chance = api, chance
        self._path = f"{KUEUE}/namespaces/{namespace}/workloads"
        flavor = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "spec": {}}
        api.post(f"{KUEUE}/resourceflavors", {**flavor, "metadata": {"name": FLAVOR}}, exists_ok=True)

    def tick(self, *, patience: float = 0.5) -> None:
        """Admit waiting Workloads; each is skipped with the probability `patience`."""
        for item in self._api.get(self._path)["items"]:
            waits = not (is_true(item, "QuotaReserved") or is_true(item, "Finished"))
            if waits and not item["metadata"].get("deletionTimestamp") and self._chance.random() >= patience:
                self._admit(item)

    def evict(self, job_uid: str) -> bool:
        """Revoke the admission of this job's Workload; return whether it was admitted."""
        for item in self._api.get(self._path)["items"]:
            owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences", ())}
            if job_uid in owners and is_true(item, "Admitted") and not is_true(item, "Finished"):
                self._write(item, {}, condition("Evicted", True, "Preempted"))
                return True
        return False

    def _admit(self, item: Json) -> None:
        sets = [
            {"name": pods["name"], "count": pods["count"], "flavors": {"cpu": FLAVOR}}
            for pods in item["spec"]["podSets"]
        ]
        self._write(
            item,
            {"admission": {"clusterQueue": "all", "podSetAssignments": sets}},
            condition("QuotaReserved", True, "QuotaReserved"),
            condition("Admitted", True, "Admitted"),
            condition("Evicted", False, "QuotaReserved"),
        )

    def _write(self, item: Json, fields: Json, *conditions: Json) -> None:
        """Write the status unless another client has written since the object was read."""
        known = {each["type"]: each for each in item.get("status", {}).get("conditions", ())}
        merged = list({**known, **{each["type"]: each for each in conditions}}.values())
        meta = {"resourceVersion": item["metadata"]["resourceVersion"]}
        path = f"{self._path}/{item['metadata']['name']}/status"
        self._api.patch(path, {"metadata": meta, "status": {**fields, "conditions": merged}})


class Readers:
    """Nodes of the pods that verify checkpoints: each pod runs for a while and ends in a random way."""

    def __init__(self, api: KubeJson, namespace: str, chance: random.Random) -> None:
        self._api, self._chance = api, chance
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    def tick(self) -> None:
        for pod in self._api.get(f"{self._path}?labelSelector={LABEL_HELPER}={HELPER}")["items"]:
            is_over = pod["status"].get("phase") in ("Succeeded", "Failed")
            if not is_over and self._chance.random() < 0.5:
                self._end(pod, int(self._chance.choice(CODES)))

    def _end(self, pod: Json, code: int) -> None:
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        ended |= {"finishedAt": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        container = {"name": HELPER, "image": "double", "imageID": "", "restartCount": 0, "ready": False}
        container |= {"state": {"terminated": ended}}
        status = {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [container]}
        meta = pod["metadata"]
        self._api.patch(
            f"{self._path}/{meta['name']}/status", {"metadata": {"uid": meta["uid"]}, "status": status}
        )


def condition(kind: str, value: bool, reason: str) -> Json:
    """Return a condition as Kueue writes it."""
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    fields = {"type": kind, "status": str(value), "reason": reason, "message": "written by the test"}
    return {**fields, "lastTransitionTime": now}
