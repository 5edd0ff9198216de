"""Kueue as a script: admits, evicts and requeues the Workloads of one namespace on a test's command.

It writes what Kueue's scheduler and workload controller write, and nothing that belongs to the job's own
controller: an eviction leaves the reservation in place until that controller gives it back.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from tests.support.devcluster import Cluster, wait_until

RESOURCE = "workloads.kueue.x-k8s.io"
Json = dict[str, Any]


class KueueDouble:
    """The queueing side of one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def workloads(self) -> list[Json]:
        return list(self._cluster.get(RESOURCE, "-n", self._namespace)["items"])

    def the_workload(self) -> Json:
        """Wait for the only Workload of the namespace and return it."""
        return dict(wait_until(lambda: self._only(), "the job's Workload"))

    def condition(self, kind: str) -> Json:
        """Return the Workload's condition of this type; empty when it has none."""
        return next((item for item in _conditions(self.the_workload()) if item["type"] == kind), {})

    def admit(self, *, flavor: str) -> None:
        """Reserve quota and admit, in one write; the Workload must be one that Kueue would have queued."""
        item = self.the_workload()
        assert item["spec"].get("active", True), "Kueue queues no Workload that is not active"
        assert self.condition("Requeued").get("status") != "False", "Kueue queues it when it is requeued"
        (pods,) = item["spec"]["podSets"]
        assignment = {"name": pods["name"], "count": pods["count"], "flavors": {"cpu": flavor}}
        admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
        self._write(
            item,
            {"admission": admission},
            _condition("QuotaReserved", True, "QuotaReserved"),
            _condition("Admitted", True, "Admitted"),
            _condition("Evicted", False, "QuotaReserved"),
        )

    def evict(self, reason: str, message: str) -> None:
        self._write(self.the_workload(), {}, _condition("Evicted", True, reason, message))

    def refuse(self, message: str) -> None:
        """Report that quota is short."""
        self._write(self.the_workload(), {}, _condition("QuotaReserved", False, "Pending", message))

    def _only(self) -> Json | None:
        found = self.workloads()
        assert len(found) <= 1, "a job has one Workload"
        return found[0] if found else None

    def _write(self, item: Json, fields: Json, *conditions: Json) -> None:
        merged = {each["type"]: each for each in (*_conditions(item), *conditions)}
        status = {**item.get("status", {}), **fields, "conditions": list(merged.values())}
        body = json.dumps({**item, "status": status})
        name = item["metadata"]["name"]
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{self._namespace}/workloads/{name}/status"
        self._cluster.kubectl("replace", "--raw", path, "-f", "-", input=body)


def _conditions(item: Json) -> list[Json]:
    return list(item.get("status", {}).get("conditions", ()))


def _condition(kind: str, value: bool, reason: str, message: str = "said by the script") -> Json:
    return {
        "type": kind,
        "status": str(value),
        "reason": reason,
        "message": message,
        "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
