"""A real API server rejects wrong jobs at `kubectl apply`, naming the field, and accepts good ones
silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.crd import (
    applied_job,
    apply_all,
    install_crd,
    refusals_by_name,
)
from tests.support.crd_cases import ACCEPTED, EDITABLE, IMMUTABLE, REFUSED, UNKNOWN
from tests.support.devcluster import Cluster
from tests.support.jobs import ABSENT
from tests.support.kube_json import KubeJson

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def namespace_of_module(control_plane: Cluster) -> Iterator[str]:
    install_crd(control_plane)
    with control_plane.namespace() as name:
        yield name


@pytest.fixture(scope="module")
def refused(control_plane: Cluster, namespace_of_module: str) -> dict[str, str]:
    jobs = [applied_job(name, namespace_of_module, changes) for name, changes, _, _ in REFUSED]
    done = apply_all(control_plane, jobs)
    assert done.stdout == "", f"these should have been refused: {done.stdout}"
    return refusals_by_name(done.stderr)


@pytest.mark.parametrize(("name", "changes", "path", "text"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused(refused: dict[str, str], name: str, changes: dict[str, Any], path: str, text: str) -> None:
    message = refused.get(name, "")
    assert f"{path}:" in message or (path == "metadata.name" and text in message), message or refused
    assert text in message


def test_unknown_keys_are_refused(control_plane: Cluster, namespace_of_module: str) -> None:
    jobs = [applied_job(f"u{i}", namespace_of_module, changes) for i, (changes, _) in enumerate(UNKNOWN)]
    done = apply_all(control_plane, jobs)
    assert done.stdout == ""
    for _, path in UNKNOWN:
        assert f'unknown field "{path}"' in done.stderr


def test_a_token_of_a_service_account_is_refused_by_name_where_unknown_keys_are_dropped(
    namespace_of_module: str, api: KubeJson
) -> None:
    """Validation is strict only for kubectl, which asks for it: other clients get the schema's refusal, not a
    silent pruning.
    """
    source = {"serviceAccountToken": {"path": "token", "audience": "spill store"}}
    volume = {"name": "t", "projected": {"sources": [source]}}
    job = applied_job("token", namespace_of_module, {"spec.podTemplate.volumes": [volume]})
    with pytest.raises(RuntimeError) as refusal:
        api.post(f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace_of_module}/zerotrainingjobs", job)
    message = str(refusal.value)
    assert "spec.podTemplate.volumes[0].projected.sources[0]" in message
    assert "serviceAccountToken is not offered" in message
    assert "in a Secret" in message


@pytest.fixture(scope="module")
def changed(control_plane: Cluster, namespace_of_module: str) -> str:
    created = apply_all(control_plane, [applied_job("steady", namespace_of_module, {})])
    assert created.returncode == 0, created.stderr
    done = apply_all(
        control_plane, [applied_job("steady", namespace_of_module, change) for change, _, _ in IMMUTABLE]
    )
    assert done.stdout == "", f"these changes should have been refused: {done.stdout}"
    return done.stderr


@pytest.mark.parametrize(
    ("change", "path", "text"), IMMUTABLE, ids=[f"{c[1]}-{i}" for i, c in enumerate(IMMUTABLE)]
)
def test_immutable(changed: str, change: dict[str, Any], path: str, text: str) -> None:
    assert any(f"{path}:" in line and text in line for line in changed.splitlines()), changed


def test_a_status_in_the_same_write_does_not_open_the_spec(
    control_plane: Cluster, namespace_of_module: str, api: KubeJson
) -> None:
    """The rule about changes lets writes of the status pass by their phase."""
    path = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace_of_module}/zerotrainingjobs/sly"
    apply_all(control_plane, [applied_job("sly", namespace_of_module, {})])
    assert api.patch(f"{path}/status", {"status": {"phase": "Pending"}})["status"]["phase"] == "Pending"
    change = {"spec": {"steps": 101}, "status": {"phase": "Running"}}
    with pytest.raises(RuntimeError) as refusal:
        api.patch(path, change)
    assert "spec.steps" in str(refusal.value)
    written = api.patch(f"{path}/status", change)
    assert (written["spec"]["steps"], written["status"]["phase"]) == (100, "Running")


def test_a_suspended_job_may_be_changed(control_plane: Cluster, namespace_of_module: str) -> None:
    frozen = {
        key: value for change, _, text in IMMUTABLE if "suspended" in text for key, value in change.items()
    }
    for change in ({"spec.suspend": True}, {**frozen, "spec.suspend": True}, {**frozen, "spec.image": "x:2"}):
        done = apply_all(control_plane, [applied_job("asleep", namespace_of_module, change)])
        assert done.returncode == 0, done.stderr


def test_what_no_running_pod_depends_on_may_change_at_any_time(
    control_plane: Cluster, namespace_of_module: str
) -> None:
    jobs = [applied_job("awake", namespace_of_module, change) for change in [{}, *EDITABLE]]
    done = apply_all(control_plane, jobs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("awake configured") == len(EDITABLE)


def test_good_jobs_are_taken_without_a_warning(control_plane: Cluster, namespace_of_module: str) -> None:
    jobs = [applied_job(name, namespace_of_module, changes) for name, changes in ACCEPTED]
    done = apply_all(control_plane, jobs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("created") == len(ACCEPTED)


def test_defaults_are_stored(control_plane: Cluster, namespace_of_module: str) -> None:
    apply_all(control_plane, [applied_job("defaults", namespace_of_module, {"spec.workers": ABSENT})])
    stored = control_plane.kubectl("get", "ztj", "defaults", "-n", namespace_of_module, "-o", "json")
    spec = json.loads(stored.stdout)["spec"]
    assert (spec["workers"], spec["suspend"], spec["managedBy"]) == (1, False, "zerotrain.dev/operator")
    assert spec["checkpoint"]["gracePeriodSeconds"] == 120
    assert not {"elastic", "hangPolicy", "nvme", "scheduling"} & set(spec)


def test_a_pattern_that_does_not_compile(control_plane: Cluster, namespace_of_module: str) -> None:
    """The API server's own RE2 gives the reason; its path ends at the rule, since the rule could not be
    evaluated.
    """
    rules = [{"onMessagePatterns": ["(a"], "action": "FailJob"}]
    done = apply_all(
        control_plane, [applied_job("pattern", namespace_of_module, {"spec.failurePolicy.rules": rules})]
    )
    assert "spec.failurePolicy.rules[0]: " in done.stderr
    assert "missing closing )" in done.stderr
    assert "regular expressions in RE2's syntax" in done.stderr
