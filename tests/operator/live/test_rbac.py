"""The shipped roles against the requests of the operators of this test run, both ways.

`call_record.py` collects every kind of request from every operator process that a test started. One that no
role grants fails here and, as a 403, in its own test. A right that no test's operator used is a right to
remove, or a test that is missing: that check needs the whole folder; for a part only the first way is judged.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.operator.call_record import FILE_VARIABLE, Call, call_of, granted, recorded
from tests.operator.kubelet_double import kubelet, wait_for_step
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, operator
from tests.support.devcluster import PATIENCE_S, REPOSITORY, Cluster, wait_until
from tests.support.kube_json import KubeJson

FOLDER = REPOSITORY / "deploy" / "kustomize"
ROLES = (FOLDER / "cluster_role.yaml", FOLDER / "lease_role.yaml")

REVIEWS = {Call("create", "authorization.k8s.io", "selfsubjectaccessreviews")}
"""Requests that the cluster's own roles grant to every user."""

NAMED: list[tuple[str, str, str]] = [
    ("GET", "/api/v1/pods?labelSelector=a&limit=500", "list pods"),
    ("GET", "/api/v1/pods?watch=true&labelSelector=a", "watch pods"),
    ("GET", "/api/v1/namespaces/ml/pods/gpt-1-0", "get pods"),
    ("GET", "/api/v1/namespaces/ml/pods/gpt-1-0/log?tailLines=100", "get pods/log"),
    ("POST", "/api/v1/namespaces/ml/pods", "create pods"),
    ("DELETE", "/api/v1/namespaces/ml/pods?labelSelector=a", "deletecollection pods"),
    ("DELETE", "/api/v1/namespaces/ml/pods/gpt-1-0", "delete pods"),
    ("PATCH", "/api/v1/namespaces/ml/configmaps/gpt-failures", "patch configmaps"),
    ("GET", "/api/v1/nodes/n", "get nodes"),
    ("GET", "/api/v1/namespaces/ml", "get namespaces"),
    ("GET", "/apis/zerotrain.dev/v1alpha1/zerotrainingjobs?watch=1", "watch zerotrainingjobs.zerotrain.dev"),
    (
        "PUT",
        "/apis/zerotrain.dev/v1alpha1/namespaces/ml/zerotrainingjobs/gpt/status",
        "update zerotrainingjobs/status.zerotrain.dev",
    ),
]


@pytest.mark.unit
@pytest.mark.parametrize(("method", "path", "call"), NAMED, ids=[call for _, _, call in NAMED])
def test_a_request_is_named_as_a_role_names_it(method: str, path: str, call: str) -> None:
    assert str(call_of(method, f"https://127.0.0.1:6443{path}")) == call


@pytest.mark.unit
@pytest.mark.parametrize("path", ["/apis/zerotrain.dev/v1alpha1", "/api/v1", "/version", "/progress", "/"])
def test_what_is_no_resource_needs_no_right(path: str) -> None:
    assert call_of("GET", f"https://127.0.0.1:6443{path}") is None


@pytest.mark.cluster
def test_a_right_for_the_rare_ways_is_used(
    control_plane: Cluster, namespace: str, operator_kubeconfig: Path, api: KubeJson, tmp_path: Path
) -> None:
    """An ordinary run does not make these requests: a name that is taken, a lost race, an opened policy."""
    seen = RecordFile()
    with operator(operator_kubeconfig, tmp_path), kubelet(api, namespace, KEY, steps=10_000) as double:
        taken(api, namespace)
        blocked = LiveJob(control_plane, namespace, name="taken", workers=1)
        wait_until(lambda: blocked.condition("Reconciling").get("reason") == "NameTaken", "the refusal")
        seen.wait_for("get", "pods")
        job = LiveJob(control_plane, namespace)
        wait_for_step(double, 5)
        with constant_writes(api, namespace):
            seen.wait_for("get", "zerotrainingjobs")
        job.patch('{"suspend": true}')
        job.wait_for("Suspended")
        policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        api.patch(f"{policies}/gpt", {"spec": {"egress": [{}]}})
        job.patch('{"suspend": false}')
        seen.wait_for("patch", "networkpolicies")
        for resource in ("services", "networkpolicies"):
            seen.wait_for("get", resource)


@pytest.mark.cluster
def test_the_roles_grant_what_operators_do_and_nothing_else(
    control_plane: Cluster, whole_folder: bool
) -> None:
    used, allowed = RecordFile().calls() - REVIEWS, granted(ROLES)
    refused = sorted(str(call) for call in used - allowed)
    assert not refused, f"no role grants what an operator did: {refused}; add it with a comment"
    idle = sorted(str(call) for call in allowed - used)
    if not whole_folder:
        print(f"only a part of the folder ran; not used by it: {idle}")
        return
    assert not idle, f"no test's operator used these rights: {idle}; remove them, or test what needs them"


@pytest.mark.unit
def test_no_service_may_be_changed_or_deleted() -> None:
    documents = YAML(typ="safe", pure=True).load_all(ROLES[0].read_text())
    rules = [rule for document in documents for rule in document.get("rules", ())]
    assert [rule["verbs"] for rule in rules if "services" in rule["resources"]] == [["get", "create"]]


class RecordFile:
    """Requests that the operators of this test run have made so far."""

    def __init__(self) -> None:
        self._file = Path(os.environ[FILE_VARIABLE])

    def calls(self) -> set[Call]:
        return recorded(self._file)

    def wait_for(self, verb: str, resource: str) -> None:
        def there() -> bool:
            return any((call.verb, call.resource) == (verb, resource) for call in self.calls())

        wait_until(there, f"an operator to {verb} {resource}")


def taken(api: KubeJson, namespace: str) -> None:
    """Create a pod that has the name of a worker and another owner."""
    pod = {"metadata": {"name": "taken-1-0"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    api.post(f"/api/v1/namespaces/{namespace}/pods", {"apiVersion": "v1", "kind": "Pod", **pod})


@contextmanager
def constant_writes(api: KubeJson, namespace: str) -> Iterator[None]:
    """Annotate the job without pause, so that status writes lose their race."""
    path = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs/gpt"
    stop = threading.Event()

    def annotate() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            api.patch(path, {"metadata": {"annotations": {"test/number": str(number)}}})

    thread = threading.Thread(target=annotate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=PATIENCE_S)
