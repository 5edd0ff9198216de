"""Objects that earlier releases stored stay readable, and a new version of the API can replace the old
one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.operator.reconcile_builders import NOW, ready, seen
from tests.operator.stored_shape import BASELINE, STORED, as_text, flattened, from_text, obstacles
from tests.support.crd import install_crd
from tests.support.devcluster import Cluster, wait_until
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.api.crd import VERSIONS, ServedVersion, custom_resource_definition, openapi_schema
from zerotrain.operator.reconcile import reconcile

Json = dict[str, Any]
OBJECTS = sorted(STORED.glob("*.json"))


def stored(path: Any) -> Json:
    return dict(json.loads(path.read_text()))


def missing(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths of `before` that `after` lacks or has otherwise."""
    if isinstance(before, dict):
        held = after if isinstance(after, dict) else {}
        return [item for key in before for item in missing(before[key], held.get(key), f"{path}.{key}")]
    if isinstance(before, list):
        kept = after if isinstance(after, list) else []
        pairs = [(item, kept[index] if index < len(kept) else None) for index, item in enumerate(before)]
        return [item for index, (a, b) in enumerate(pairs) for item in missing(a, b, f"{path}[{index}]")]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


@pytest.mark.unit
def test_the_schema_takes_all_that_earlier_releases_stored() -> None:
    assert obstacles(from_text(BASELINE.read_text()), dict(flattened(openapi_schema()))) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("path", "change", "obstacle_text"),
    [
        (".spec.workers", {"maximum": 5000}, "maximum fell from 10000 to 5000"),
        (".spec.steps", {"type": "string"}, "type was integer and is string"),
        (".spec.suspend", {"default": True}, "default was False and is True"),
        (".spec.runPolicy.cleanPodPolicy", {"enum": ["All"]}, "became ['All']"),
        (".spec.checkpoint", {"required": ["volume", "verify"]}, "['verify'] became required"),
        (".status.attempt", None, "is gone"),
    ],
)
def test_a_schema_that_takes_less_than_before_is_reported(
    path: str, change: Json | None, obstacle_text: str
) -> None:
    old = from_text(as_text(openapi_schema()))
    new = {key: dict(value) for key, value in old.items()}
    if change is None:
        del new[path]
    else:
        new[path] |= change
    (obstacle,) = obstacles(old, new)
    assert obstacle_text in obstacle


@pytest.mark.unit
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_a_stored_job_is_read_without_loss(path: Any) -> None:
    job = stored(path)
    read = ZeroTrainingJob.parse(job).model_dump(mode="json", by_alias=True, exclude_none=True)
    for part in ("spec", "status"):
        assert missing(job[part], read[part]) == []


@pytest.mark.unit
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_an_operator_of_today_takes_over_a_running_job_without_touching_it(path: Any) -> None:
    job = stored(path)
    attempt = job["status"]["attempt"]
    plan = reconcile(job, seen(ready(0, attempt), ready(1, attempt)), NOW)
    assert plan.status is None or (plan.status.phase, plan.status.attempt) == ("Running", attempt)
    assert [type(action).__name__ for action in plan.actions if type(action).__name__ in DISTURBING] == []


DISTURBING = {"CreateWorkers", "DeleteWorkers", "DeletePods", "RequestYield", "DeleteJob"}


@pytest.mark.unit
def test_exactly_one_version_is_stored() -> None:
    other = ServedVersion(name="v1beta1", storage=True)
    with pytest.raises(ValueError, match="exactly one version"):
        custom_resource_definition((*VERSIONS, other))


@pytest.mark.cluster
def test_the_api_server_keeps_every_field_of_a_stored_job(control_plane: Cluster, namespace: str) -> None:
    install_crd(control_plane)
    for path in OBJECTS:
        job = stored(path)
        job["metadata"] = {"name": path.stem, "namespace": namespace}
        control_plane.apply(job)
        found = control_plane.get("ztj", path.stem, "-n", namespace)
        body = json.dumps({**found, "status": job["status"]})
        control_plane.kubectl("replace", "--subresource=status", "-f", "-", input=body)
        kept = control_plane.get("ztj", path.stem, "-n", namespace)
        for part in ("spec", "status"):
            assert missing(job[part], kept[part]) == []


@pytest.mark.cluster
def test_a_new_version_takes_over_as_in_the_guide(control_plane: Cluster, namespace: str) -> None:
    """The steps of docs/upgrading.md work, on a kind of the test's own."""
    cluster = Upgrade(control_plane, namespace)
    old, new = VERSIONS[0].name, "v1beta1"
    cluster.serve(ServedVersion(name=old, storage=True))
    job = stored(OBJECTS[0])
    cluster.create(job, old)
    cluster.serve(ServedVersion(name=old, storage=True), ServedVersion(name=new, storage=False))
    assert missing(job["spec"], cluster.read(new)["spec"]) == []
    leaving = ServedVersion(name=old, storage=False, deprecation=f"use {new}")
    cluster.serve(leaving, ServedVersion(name=new, storage=True))
    assert cluster.stored_versions() == [old, new]
    cluster.rewrite(new)
    cluster.forget(old)
    cluster.serve(ServedVersion(name=new, storage=True))
    assert cluster.stored_versions() == [new]
    assert missing(job["spec"], cluster.read(new)["spec"]) == []


class Upgrade:
    """A kind with our schema under a group of its own, so that the shared one is left alone."""

    GROUP = "upgrade.zerotrain.dev"
    NAME = f"zerotrainingjobs.{GROUP}"

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def serve(self, *versions: ServedVersion) -> None:
        crd = custom_resource_definition(versions)
        crd["metadata"] = {"name": self.NAME}
        names = {**crd["spec"]["names"], "shortNames": [], "categories": []}
        crd["spec"] = {**crd["spec"], "group": self.GROUP, "names": names}
        # Server-side: the annotation of a client's apply cannot hold a schema of this size twice.
        self._cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(crd))
        for version in versions:
            wait_until(lambda name=version.name: self._try_read(name), f"{version.name} to be served")

    def create(self, job: Json, version: str) -> None:
        body = {**job, "apiVersion": f"{self.GROUP}/{version}"}
        body["metadata"] = {"name": "gpt", "namespace": self._namespace}
        self._cluster.kubectl("create", "-f", "-", input=json.dumps(body))

    def read(self, version: str) -> Json:
        return dict(json.loads(self._cluster.kubectl("get", "--raw", self._path(version)).stdout))

    def rewrite(self, version: str) -> None:
        """Write every object back unchanged, as the storage migration does."""
        self._cluster.kubectl("replace", "-f", "-", input=json.dumps(self.read(version)))

    def stored_versions(self) -> list[str]:
        return list(self._cluster.get("crd", self.NAME)["status"]["storedVersions"])

    def forget(self, version: str) -> None:
        kept = [name for name in self.stored_versions() if name != version]
        patch = json.dumps({"status": {"storedVersions": kept}})
        self._cluster.kubectl("patch", "crd", self.NAME, "--subresource=status", "--type=merge", "-p", patch)

    def _try_read(self, version: str) -> bool:
        path = f"/apis/{self.GROUP}/{version}/namespaces/{self._namespace}/zerotrainingjobs"
        return self._cluster.kubectl("get", "--raw", path, check=False).returncode == 0

    def _path(self, version: str) -> str:
        return f"/apis/{self.GROUP}/{version}/namespaces/{self._namespace}/zerotrainingjobs/gpt"
