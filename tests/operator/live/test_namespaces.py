"""An operator for a few namespaces: a Role in each and no right outside of them, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.operator.kubelet_double import kubelet
from tests.operator.live_job import LiveJob
from tests.operator.operator_process import KEY, NAMESPACE, OperatorProcess, operator, write_kubeconfig
from tests.support.devcluster import REPOSITORY, Cluster, wait_until
from tests.support.jobs import ABSENT
from tests.support.kube_json import KubeJson
from zerotrain.operator.cluster.jobs import ALL_JOBS
from zerotrain.operator.cluster.listwatch import scoped
from zerotrain.operator.controller.config import OperatorConfig, OperatorConfigError

ACCOUNT = "scoped-operator"
CLUSTER_SCOPED = {"nodes", "priorityclasses", "resourceflavors", "storageclasses"}
VARIABLE = "ZEROTRAIN_OPERATOR_NAMESPACES"


def namespaced_rules() -> list[dict[str, Any]]:
    """Return the shipped rules without cluster-scoped resources."""
    text = (REPOSITORY / "deploy" / "kustomize" / "cluster_role.yaml").read_text()
    rules = YAML(typ="safe", pure=True).load(text)["rules"]
    return [rule for rule in rules if not CLUSTER_SCOPED & set(rule["resources"])]


def bind(role: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": ACCOUNT, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    }


def grant(cluster: Cluster, namespace: str) -> None:
    cluster.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": ACCOUNT, "namespace": namespace},
            "rules": namespaced_rules(),
        }
    )
    cluster.apply(bind(ACCOUNT, namespace))


@pytest.fixture
def spaces(control_plane: Cluster, operator_kubeconfig: Path) -> Iterator[tuple[str, str, str]]:
    """Two namespaces that the operator watches and one that it does not."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": ACCOUNT, "namespace": NAMESPACE},
    }
    control_plane.apply(account)
    control_plane.apply(bind("zerotrain-operator-lease", NAMESPACE))
    with (
        control_plane.namespace() as first,
        control_plane.namespace() as second,
        control_plane.namespace() as foreign,
    ):
        grant(control_plane, first)
        grant(control_plane, second)
        yield first, second, foreign


def scoped_operator(cluster: Cluster, folder: Path, *namespaces: str) -> Any:
    token = cluster.kubectl("create", "token", ACCOUNT, "-n", NAMESPACE).stdout.strip()
    kubeconfig = write_kubeconfig(cluster, token, folder / "scoped.kubeconfig")
    return operator(kubeconfig, folder, {VARIABLE: ",".join(namespaces)})


def logged_once(process: OperatorProcess, what: str) -> bool:
    return process.log.read_text().count(what) == 1


@pytest.mark.cluster
def test_jobs_run_in_the_named_namespaces_with_a_role_in_each(
    control_plane: Cluster, spaces: tuple[str, str, str], api: KubeJson, tmp_path: Path
) -> None:
    first, second, foreign = spaces
    with (
        scoped_operator(control_plane, tmp_path, first, second) as process,
        kubelet(api, first, KEY, steps=10_000),
        kubelet(api, second, KEY, steps=10_000),
    ):
        process.expects_refusals = True
        jobs = [LiveJob(control_plane, space, workers=2) for space in (first, second)]
        outside = LiveJob(control_plane, foreign, workers=2)
        for job in jobs:
            job.wait_for("Running")
        # A change of a running job comes through the watch of its own namespace.
        jobs[0].patch('{"suspend": true}')
        jobs[0].wait_for("Suspended")
        assert outside.status() == {}
        assert not control_plane.get("pods", "-n", foreign)["items"]
        wait_until(
            lambda: logged_once(process, "nodes cannot be watched"), "the refusal of nodes to be told once"
        )
        assert "Traceback" not in process.log.read_text()
        refused = process.refusals()
        assert refused, "nothing was refused: the roles of this test are too wide"
        assert {line.split(": ")[0].split(" ")[1] for line in refused} == {"/api/v1/nodes"}


@pytest.mark.cluster
def test_a_restart_finds_the_pods_of_all_namespaces_before_it_acts(
    control_plane: Cluster, spaces: tuple[str, str, str], api: KubeJson, tmp_path: Path
) -> None:
    first, second, _ = spaces
    with (
        scoped_operator(control_plane, tmp_path, first, second) as process,
        kubelet(api, first, KEY, steps=10_000) as one,
        kubelet(api, second, KEY, steps=10_000) as two,
    ):
        process.expects_refusals = True
        jobs = [LiveJob(control_plane, space, workers=2, checkpoint=ABSENT) for space in (first, second)]
        for job in jobs:
            job.wait_for("Running")
        process.kill()
        process.start()
        for job in jobs:
            assert job.wait_for("Running")["attempt"] == 1
        assert [len(double.created) for double in (one, two)] == [2, 2]


@pytest.mark.cluster
def test_a_namespace_that_loses_its_roles_stops_no_other(
    control_plane: Cluster, spaces: tuple[str, str, str], api: KubeJson, tmp_path: Path
) -> None:
    first, second, _ = spaces
    with (
        scoped_operator(control_plane, tmp_path, first, second, "never-made") as process,
        kubelet(api, first, KEY, steps=10_000),
        kubelet(api, second, KEY, steps=10_000) as double,
    ):
        process.expects_refusals = True
        before = LiveJob(control_plane, second, "before", workers=2, checkpoint=ABSENT)
        before.wait_for("Running")
        control_plane.kubectl("delete", "rolebinding", ACCOUNT, "-n", second)
        process.kill()
        process.start()
        # Jobs elsewhere are reconciled, and /readyz names the namespace that is not.
        LiveJob(control_plane, first, workers=2).wait_for("Running")
        lines = process.get("/readyz").splitlines()
        assert lines[0] == "ok"
        kinds, spaces_lost = ("pods", "zerotrainingjobs"), (second, "never-made")
        unreadable = {f"namespace {space}: {kind}" for kind in kinds for space in spaces_lost}
        unreadable.add("the whole cluster: nodes")
        assert {line.split(" may not")[0] for line in lines[1:]} == unreadable
        shown = process.get("/metrics")
        for place, value in ((second, "1.0"), ("never-made", "1.0"), (first, "0.0")):
            labels = f'resource="pods",watched_namespace="{place}"'
            assert f"zerotrain_operator_unreadable{{{labels}}} {value}" in shown
        assert process.get("/healthz") == "ok"
        unseen = LiveJob(control_plane, second, "unseen", workers=2)
        assert unseen.status() == {}
        control_plane.apply(bind(ACCOUNT, second))
        unseen.wait_for("Running")
        # The pods of the job from before were found, not made again.
        assert before.wait_for("Running")["attempt"] == 1
        assert len(double.created) == 4
        log, refused = process.log.read_text(), "cannot be watched and are not seen until access is granted"
        assert log.count(f"pods {refused}: GET {_pods(second)}") == 1
        jobs_path = scoped(ALL_JOBS, (second,))[0]
        assert log.count(f"{refused}: GET {jobs_path}") == 1
        assert "Traceback" not in log


def _pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


@pytest.mark.unit
def test_paths_of_both_modes() -> None:
    assert scoped("/api/v1/pods", ()) == ("/api/v1/pods",)
    assert scoped("/apis/x/v1/things", ("a", "b")) == (
        "/apis/x/v1/namespaces/a/things",
        "/apis/x/v1/namespaces/b/things",
    )
    assert OperatorConfig.from_env({}).namespaces == ()
    assert OperatorConfig.from_env({VARIABLE: "a, b,a,"}).namespaces == ("a", "b")


@pytest.mark.unit
@pytest.mark.parametrize("name", ["team-*", "!team", "Team", "a b"])
def test_a_pattern_is_refused_because_it_would_need_to_list_namespaces(name: str) -> None:
    with pytest.raises(OperatorConfigError, match="ZEROTRAIN_OPERATOR_NAMESPACES"):
        OperatorConfig.from_env({VARIABLE: name})
