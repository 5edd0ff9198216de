"""The admission policy in front of the operator: what it rejects, what it lets through, and that a bad job
which was stored before it can still be labelled, suspended and deleted.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from deploy.devcluster.cluster import ClusterError
from tests.support.crd import CRD_NAME, wait_established
from tests.support.devcluster import REPOSITORY, Cluster, wait_until
from tests.support.jobs import job_json
from zerotrain.operator.api.admission_policy import MAX_TEXT, policy
from zerotrain.operator.constants import MAX_FREE_ENTRIES, MAX_SPEC_DEPTH

pytestmark = pytest.mark.cluster


def deep(levels: int) -> Any:
    return json.loads('{"a":' * levels + "1" + "}" * levels)


def job(name: str, namespace: str, config: Any) -> dict[str, Any]:
    body = job_json({"metadata": {"name": name, "namespace": namespace}})
    body["spec"] |= {"config": config, "suspend": True}
    return body


class Stored:
    """Jobs of one namespace at the API server."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self._folder = cluster, namespace, folder

    def create(self, name: str, config: Any) -> str:
        """Create a job; return the API server's refusal, empty where it accepted."""
        file = self._folder / f"{name}.json"
        file.write_text(json.dumps(job(name, self.namespace, config)))
        return self.kubectl("create", "-f", str(file))

    def kubectl(self, *command: str) -> str:
        try:
            self.cluster.kubectl(*command)
        except ClusterError as error:
            return str(error)
        return ""


@pytest.fixture
def stored(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[Stored]:
    """Jobs with a bad one from before the policy, which is bound to this namespace alone."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(REPOSITORY / "crds"))
    wait_established(control_plane, CRD_NAME)
    jobs = Stored(control_plane, namespace, tmp_path)
    assert jobs.create("before", deep(MAX_SPEC_DEPTH + 5)) == ""
    rule, binding = copy.deepcopy(policy())
    binding["spec"]["matchResources"] = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    }
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump_all([rule, binding], text)
    file = tmp_path / "policy.yaml"
    file.write_text(text.getvalue())
    control_plane.kubectl("apply", "-f", str(file))
    wait_until(lambda: "denied" in jobs.create("probe", deep(MAX_SPEC_DEPTH + 1)), "the policy to hold")
    yield jobs
    control_plane.kubectl("delete", "-f", str(file))


REFUSED: dict[str, Any] = {
    "deep": deep(MAX_SPEC_DEPTH + 1),
    "lists": {"a": json.loads("[" * MAX_SPEC_DEPTH + "]" * MAX_SPEC_DEPTH)},
    "entries": {"x": [{}] * (MAX_FREE_ENTRIES + 1)},
    "keys": {f"k{number}": 1 for number in range(MAX_FREE_ENTRIES + 1)},
    "text": {"a": [{"b": "x" * (MAX_TEXT + 1)}]},
    "key": {"a": {"x" * (MAX_TEXT + 1): 1}},
}
ACCEPTED: dict[str, Any] = {
    "depth": deep(MAX_SPEC_DEPTH),
    "most": {"x": [1] * MAX_FREE_ENTRIES, "y": "x" * MAX_TEXT},
    "usual": {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "_comment": "note"},
        "betas": [0.9, 0.95],
        "nothing": None,
        "on": True,
    },
}


def test_free_form_parts_are_bounded(stored: Stored) -> None:
    for name, config in REFUSED.items():
        kubectl = stored.create(name, config)
        assert "spec.config" in kubectl, (name, kubectl)
    for name, config in ACCEPTED.items():
        assert stored.create(name, config) == "", name


def test_what_was_stored_before_can_be_labelled_suspended_mended_and_deleted(stored: Stored) -> None:
    target = ("ztj", "before", "-n", stored.namespace)
    assert stored.kubectl("label", *target, "seen=yes") == ""
    for value in ("false", "true"):
        assert (
            stored.kubectl("patch", *target, "--type=merge", "-p", f'{{"spec":{{"suspend":{value}}}}}') == ""
        )
    worse = json.dumps({"spec": {"config": {"b": deep(MAX_SPEC_DEPTH + 1)}}})
    assert "spec.config" in stored.kubectl("patch", *target, "--type=merge", "-p", worse)
    mended = json.dumps({"spec": {"config": {"a": None, "train_micro_batch_size_per_gpu": 1}}})
    assert stored.kubectl("patch", *target, "--type=merge", "-p", mended) == ""
    assert stored.kubectl("delete", *target) == ""


@pytest.mark.parametrize("example", sorted((REPOSITORY / "deploy" / "examples").glob("*.yaml")), ids=str)
def test_every_example_passes(example: Path) -> None:
    """The example stays within the numbers, which the test above compares with the API server."""
    for body in YAML(typ="safe", pure=True).load_all(example.read_text()):
        spec = (body or {}).get("spec") or {}
        config = spec.get("config") if body and body.get("kind") == "ZeroTrainingJob" else None
        assert _bounded(config or {}, 1)


def _bounded(part: Any, depth: int) -> bool:
    if isinstance(part, str):
        return len(part) <= MAX_TEXT
    if not isinstance(part, (dict, list)):
        return True
    inner = list(part.values()) if isinstance(part, dict) else part
    return (
        depth <= MAX_SPEC_DEPTH
        and len(inner) <= MAX_FREE_ENTRIES
        and all(_bounded(v, depth + 1) for v in inner)
    )
