"""One job on a live cluster, as a test drives it: apply, look, wait, judge."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from tests.operator.kubelet_double import KubeletDouble
from tests.support.devcluster import PATIENCE_S, Cluster, wait_until
from tests.support.jobs import job_json


class LiveJob:
    """A job applied with kubectl."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "gpt", **spec: Any) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        changes = {f"spec.{path.replace('__', '.')}": value for path, value in spec.items()}
        job = job_json({"metadata": {"name": name, "namespace": namespace}, **changes})
        cluster.apply(job)

    def object(self) -> dict[str, Any]:
        return dict(self.cluster.get("ztj", self.name, "-n", self.namespace))

    def status(self) -> dict[str, Any]:
        return dict(self.object().get("status", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        found = [item for item in self.status().get("conditions", ()) if item["type"] == kind]
        return dict(found[0]) if found else {}

    def wait_for(self, phase: str, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the status once the job is in this phase."""

        def there() -> dict[str, Any] | None:
            status = self.status()
            return status if status.get("phase") == phase else None

        try:
            return dict(wait_until(there, f"phase {phase}", timeout_s=timeout_s, every_s=0.25))
        except TimeoutError as error:
            raise TimeoutError(f"{error}; status is {self.status()}") from None

    def patch(self, spec: str) -> None:
        """Merge JSON into the spec."""
        self.cluster.kubectl(
            "patch", "ztj", self.name, "-n", self.namespace, "--type=merge", "-p", f'{{"spec": {spec}}}'
        )

    def events(self, *reasons: str) -> list[tuple[str, str]]:
        """Return reason and message of every event on the job, as soon as there are events for these reasons.

        The operator posts events after it has written the status.
        """

        def posted() -> tuple[list[tuple[str, str]]] | None:
            found = self._events()
            return None if Counter(reasons) - Counter(reason for reason, _ in found) else (found,)

        return list(wait_until(posted, f"the events {reasons}")[0])

    def _events(self) -> list[tuple[str, str]]:
        items = self.cluster.get("events", "-n", self.namespace)["items"]
        mine = [item for item in items if item["involvedObject"].get("kind") == "ZeroTrainingJob"]
        return [(item["reason"], item["message"]) for item in mine]

    def owned(self) -> list[str]:
        """Return kind/name of everything in the namespace that belongs to the job."""
        kinds = "pods,services,configmaps,secrets,networkpolicies"
        items = self.cluster.get(kinds, "-n", self.namespace)["items"]
        return sorted(
            f"{item['kind']}/{item['metadata']['name']}"
            for item in items
            if any(
                owner["kind"] == "ZeroTrainingJob" for owner in item["metadata"].get("ownerReferences", ())
            )
        )


def check_attempts(double: KubeletDouble, *, attempts: int, workers: int = 2) -> None:
    """Check that no pod was made twice, no attempt skipped, no two attempts overlapped, and every attempt
    began at the last durable step.
    """
    names = [name for name, _ in double.created]
    assert len(names) == len(set(names)), f"a pod name was used twice: {names}"
    assert not double.overlaps
    trainings = double.trainings()
    assert [training.attempt for training in trainings] == list(range(1, attempts + 1))
    assert len(names) == attempts * workers
    for earlier, later in pairwise(trainings):
        assert later.first == earlier.durable
