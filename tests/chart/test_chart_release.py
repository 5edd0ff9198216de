"""The life of a release on a real API server without nodes: what each verb of helm leaves behind."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.operator.call_record import Call, granted
from tests.support.crd import CRD_NAME
from tests.support.devcluster import REPOSITORY, Cluster, Devcluster, wait_until
from tests.support.helm import CHART, RELEASE, Helm
from tests.support.prometheus_operator import install_crds

NAMESPACE = "zerotrain-system"
KEY = "zerotrain-operator-key"
KUSTOMIZE = REPOSITORY / "deploy" / "kustomize"
RELEASE_LIMIT_BYTES = 1 << 20
"""Size limit of a Secret, and so of a release's record: chart, values and manifests in one."""

JOB: dict[str, Any] = {
    "apiVersion": "zerotrain.dev/v1alpha1",
    "kind": "ZeroTrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "workers": 1,
        "image": "localhost/zerotrain:dev",
        "model": {"gpt": {"dModel": 32, "layers": 1, "heads": 2, "context": 32}},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 10,
        "config": {"train_micro_batch_size_per_gpu": 1},
    },
}

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def cluster(devcluster: Devcluster) -> Iterator[Cluster]:
    """Empty cluster of the file's own, on which the product was never installed."""
    with devcluster.lease("control-plane") as found:
        yield found


@pytest.fixture
def release(helm: Path, cluster: Cluster, tmp_path: Path) -> Iterator[Helm]:
    """Helm for a release that does not exist yet; whatever it leaves is removed afterwards."""
    tool = Helm(program=helm, home=tmp_path, namespace=NAMESPACE, kubeconfig=cluster.kubeconfig)
    yield tool
    tool.attempt("uninstall", RELEASE, "--ignore-not-found")
    cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")
    cluster.kubectl("delete", "secret", KEY, "-n", NAMESPACE, "--ignore-not-found")


def key(cluster: Cluster) -> str:
    data = cluster.get("secret", KEY, "-n", NAMESPACE)["data"]
    return base64.b64decode(data["key"]).decode()


def deployment(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("deployment", "zerotrain-operator", "-n", NAMESPACE)
    return found


def environ(cluster: Cluster) -> Mapping[str, str]:
    (container,) = deployment(cluster)["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_install_upgrade_rollback_uninstall_and_again(cluster: Cluster, release: Helm) -> None:
    output = release.install()
    first = key(cluster)
    assert len(first) == 64
    assert "the whole cluster" in output
    assert "jobs.extraHttpCidrs" in output
    cluster.apply(JOB, namespace="default")
    job = cluster.get("ztj", "gpt", "-n", "default")["metadata"]["uid"]

    output += release.upgrade(values={"operator": {"replicas": 2, "resyncSeconds": 120}})
    assert deployment(cluster)["spec"]["replicas"] == 2
    assert environ(cluster)["ZEROTRAIN_OPERATOR_RESYNC_SECONDS"] == "120"
    assert cluster.get("pdb", "-n", NAMESPACE)["items"][0]["spec"]["maxUnavailable"] == 1
    output += release.run("get", "all", RELEASE) + release.run("get", "manifest", RELEASE)

    release.run("rollback", RELEASE, "1")
    assert deployment(cluster)["spec"]["replicas"] == 1
    assert "ZEROTRAIN_OPERATOR_RESYNC_SECONDS" not in environ(cluster)
    assert cluster.get("pdb", "-n", NAMESPACE)["items"] == []

    release.uninstall()
    assert cluster.get("deployments,roles,networkpolicies", "-n", NAMESPACE)["items"] == []
    assert cluster.get("clusterroles", "-l", "app.kubernetes.io/name=zerotrain")["items"] == []
    assert cluster.get("ztj", "gpt", "-n", "default")["metadata"]["uid"] == job

    output += release.install()
    assert cluster.get("ztj", "gpt", "-n", "default")["metadata"]["uid"] == job
    assert key(cluster) == first, "jobs that run know tokens of the first key"
    assert first not in output
    assert base64.b64encode(first.encode()).decode() not in output


def test_without_keep_the_custom_resource_goes_with_the_release(cluster: Cluster, release: Helm) -> None:
    output = release.install(values={"crds": {"keep": False}})
    assert "deletes the custom resource, and with it every job" in output
    release.uninstall("--wait")
    assert cluster.kubectl("get", "crd", CRD_NAME, check=False).returncode != 0


def test_an_older_chart_leaves_a_newer_custom_resource_in_place(
    cluster: Cluster, release: Helm, tmp_path: Path
) -> None:
    """The way back in docs/upgrading.md keeps the newer custom resource; `helm rollback` does not."""
    newer = tmp_path / "zerotrain"
    shutil.copytree(CHART, newer)
    crd = newer / "files" / "generated" / "crds" / f"zerotrain.dev_{CRD_NAME.split('.')[0]}.yaml"
    crd.write_text(crd.read_text().replace("    shortNames:\n", "    shortNames:\n    - newer\n", 1))

    def is_newer() -> bool:
        return "newer" in cluster.get("crd", CRD_NAME)["spec"]["names"]["shortNames"]

    release.install()
    assert not is_newer()
    release.upgrade(chart=newer)
    assert is_newer()
    release.upgrade(values={"crds": {"enabled": False}})
    assert is_newer()
    release.run("rollback", RELEASE, "1")
    assert not is_newer(), "the page may stop warning"


def test_another_entry_of_the_key_is_refused(cluster: Cluster, release: Helm) -> None:
    """The Secret exists and keeps its entry; the operator would wait for one that never comes."""
    release.install()
    first = key(cluster)
    refused = release.attempt("upgrade", RELEASE, CHART, values={"channelKey": {"entry": "token"}})
    assert refused.returncode != 0
    assert f'the Secret {KEY} has no entry "token"' in refused.stderr
    assert "channelKey.entry" in refused.stderr
    assert first not in refused.stderr + refused.stdout
    assert key(cluster) == first


def test_a_second_operator_over_the_same_jobs_is_refused(
    cluster: Cluster, release: Helm, tmp_path: Path
) -> None:
    """Two operators would overwrite each other's objects, with a key each."""
    second = replace(release, namespace="second", home=tmp_path / "second")
    values: dict[str, Any] = {"crds": {"enabled": False}}
    scoped = values | {"watch": {"namespaces": ["default"]}, "rbac": {"userRoles": False}}
    install = ("install", "other", CHART, "--create-namespace")
    release.install()
    refused = second.attempt(*install, values=values)
    assert refused.returncode != 0
    assert f"the operator {NAMESPACE}/zerotrain-operator does that" in refused.stderr
    assert "watch.namespaces" in refused.stderr
    release.upgrade(values={"operator": {"replicas": 2}})  # it is not a second one of its own
    try:
        release.uninstall()
        second.run(*install, values=scoped)
        refused = release.attempt("install", RELEASE, CHART)
        assert refused.returncode != 0
        assert "second/other-zerotrain-operator" in refused.stderr
        release.install(
            values={"watch": {"namespaces": ["kube-public"]}, "admissionPolicy": {"enabled": False}}
        )
    finally:
        second.attempt("uninstall", "other", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", "second", "--ignore-not-found", "--wait=false")


def test_a_typo_changes_nothing(cluster: Cluster, release: Helm) -> None:
    refused = release.attempt(
        "install", RELEASE, CHART, "--create-namespace", values={"operator": {"replica": 2}}
    )
    assert refused.returncode != 0
    assert "'replica' not allowed" in refused.stderr
    release.install()
    before = deployment(cluster)["metadata"]["generation"]
    refused = release.attempt("upgrade", RELEASE, CHART, values={"crd": {"keep": False}})
    assert refused.returncode != 0
    assert "'crd' not allowed" in refused.stderr
    assert deployment(cluster)["metadata"]["generation"] == before


def test_a_record_of_the_release_fits_its_secret(cluster: Cluster, release: Helm) -> None:
    """Dashboards and rules are long; at the limit no release could be installed any more."""
    install_crds(cluster, ("podmonitors", "servicemonitors", "prometheusrules"))
    release.install("--values", str(CHART / "ci" / "everything-values.yaml"))
    records = cluster.get("secrets", "-n", NAMESPACE, "--field-selector", "type=helm.sh/release.v1")["items"]
    assert max(len(json.dumps(record)) for record in records) < 0.75 * RELEASE_LIMIT_BYTES
    # The API server accepted every field of the Prometheus operator's kinds, and dropped none.
    monitor = cluster.get("podmonitor", "zerotrain-workers", "-n", NAMESPACE)
    assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert [entry.get("targetLabel") for entry in endpoint["relabelings"]] == [None, "node", "attempt"]
    assert endpoint["metricRelabelings"][0]["action"] == "drop"
    assert (monitor["spec"]["sampleLimit"], monitor["spec"]["bodySizeLimit"]) == (20000, "8MB")
    assert cluster.get("servicemonitor", "zerotrain-operator", "-n", NAMESPACE)["spec"]["endpoints"][0][
        "honorLabels"
    ]
    rules = cluster.get("prometheusrules", "-n", NAMESPACE)["items"]
    alerts = [
        rule
        for item in rules
        for group in item["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(alerts) >= 30
    assert all(rule["labels"]["team"] == "training" for rule in alerts)
    (test_counters,) = (
        item
        for item in cluster.get("configmaps", "-n", NAMESPACE)["items"]
        if item["metadata"]["name"].endswith("dcgm-metrics")
    )
    assert "DCGM_FI_DEV_XID_ERRORS" in test_counters["data"]["dcgm-metrics.csv"]


def refused(cluster: Cluster, calls: set[Call], namespace: str | None) -> set[Call]:
    """Return those of the requests that the operator's account may not make in the namespace."""
    user = f"system:serviceaccount:{NAMESPACE}:zerotrain-operator"
    order = sorted(calls)
    reviews = []
    for call in order:
        resource, _, subresource = call.resource.partition("/")
        attributes = {
            "verb": call.verb,
            "group": call.group,
            "resource": resource,
            "subresource": subresource,
        }
        if namespace:
            attributes["namespace"] = namespace
        reviews.append(
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "resourceAttributes": attributes},
            }
        )
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    shown = "jsonpath={.status.allowed}{' '}"
    allowed = cluster.kubectl("create", "-f", "-", "-o", shown, input=text).stdout.split()
    return {call for call, answer in zip(order, allowed, strict=True) if answer != "true"}


def test_in_single_namespaces_the_operator_may_act_there_and_nowhere_else(
    cluster: Cluster, release: Helm
) -> None:
    wanted = granted([KUSTOMIZE / "cluster_role.yaml"])
    reads = {
        call
        for call in wanted
        if call.resource in ("nodes", "priorityclasses", "resourceflavors", "storageclasses")
    }
    with cluster.namespace() as watched, cluster.namespace() as other:

        def settles(calls: set[Call], namespace: str | None, expected: set[Call]) -> None:
            # The API server learns of roles by a watch, a moment after they are written.
            wait_until(lambda: refused(cluster, calls, namespace) == expected, f"{namespace}: {expected}")

        release.install(values={"watch": {"namespaces": [watched]}})
        assert environ(cluster)["ZEROTRAIN_OPERATOR_NAMESPACES"] == watched
        settles(wanted - reads, watched, set())
        settles(reads, None, set())
        assert refused(cluster, wanted - reads, other) == wanted - reads
        release.upgrade(values={"watch": {"namespaces": [watched]}, "rbac": {"clusterReads": False}})
        settles(reads, None, reads)
        release.upgrade("--reset-values")  # without values helm keeps those of the release
        settles(wanted, other, set())
        assert refused(cluster, wanted, None) == set()


def test_who_may_edit_a_namespace_may_edit_its_jobs(cluster: Cluster, release: Helm) -> None:
    release.install()
    with cluster.namespace() as name:
        for role in ("edit", "view"):
            cluster.kubectl(
                "create", "rolebinding", role, "-n", name, f"--clusterrole={role}", f"--user={role}"
            )

        def may(user: str, verb: str) -> bool:
            words = ("auth", "can-i", verb, "ztj", "-n", name, f"--as={user}")
            return cluster.kubectl(*words, check=False).stdout.strip() == "yes"

        # The built-in roles are aggregated a moment later.
        wait_until(lambda: may("edit", "create") and may("view", "list"), "the roles to be aggregated")
        assert not may("view", "create")


def test_an_installation_of_the_manifests_becomes_a_release(cluster: Cluster, release: Helm) -> None:
    """The steps of docs/install.md keep jobs and key; the Deployment is made anew for its selector."""
    cluster.kubectl("apply", "-k", str(KUSTOMIZE))
    try:
        cluster.kubectl("create", "secret", "generic", KEY, "-n", NAMESPACE, "--from-literal=key=" + "k" * 64)
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD_NAME}", "--timeout=100s")
        cluster.apply(JOB, namespace="default")
        cluster.kubectl("delete", "deployment", "zerotrain-operator", "-n", NAMESPACE)
        release.install("--take-ownership", "--force-conflicts")
        assert key(cluster) == "k" * 64
        assert cluster.get("ztj", "gpt", "-n", "default")["metadata"]["name"] == "gpt"
        assert deployment(cluster)["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    finally:
        cluster.kubectl("delete", "clusterrolebinding", "zerotrain-operator", "--ignore-not-found")
