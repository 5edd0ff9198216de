"""The rendered chart: valid for every Kubernetes it names, restricted, and the same operator that
deploy/kustomize installs.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.operator.call_record import Call, granted
from tests.support.devcluster import REPOSITORY
from tests.support.helm import CHART, MONITORING_API, Helm, named
from tests.support.jobs import make_job
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT
from zerotrain.operator.constants import HTTP_PORT_NAME, LABEL_RANK
from zerotrain.operator.controller.config import PREFIX, OperatorConfig
from zerotrain.operator.resources import ResourceOptions, network_policy

pytestmark = pytest.mark.tools


CI = sorted((CHART / "ci").glob("*-values.yaml"))
KUSTOMIZE = REPOSITORY / "deploy" / "kustomize"
KUBERNETES = tuple(f"1.{minor}" for minor in range(29, 38))
"""Versions from the oldest that Chart.yaml allows to the newest whose schemas are available."""

Manifests = list[dict[str, Any]]


@pytest.fixture(scope="module")
def renderer(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(program=helm, home=tmp_path_factory.mktemp("helm"))


POLICY = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


@pytest.fixture(scope="module")
def rendered(renderer: Helm) -> dict[str, Manifests]:
    """The manifests of every example, by its name."""
    return {path.stem.removesuffix("-values"): renderer.template(files=[path]) for path in CI}


@pytest.fixture(scope="module")
def validator() -> Iterator[Any]:
    """kubernetes_validate, whose import takes seconds.

    It parses its files anew for every object, which takes nearly all of its time; here they are parsed once.
    """
    import kubernetes_validate  # type: ignore[import-untyped]

    with pytest.MonkeyPatch.context() as patch:
        cached = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", cached)
        yield kubernetes_validate


def ours(manifests: Manifests) -> Manifests:
    """Return the manifests without the Prometheus operator's objects, which a real API server validates
    elsewhere.
    """
    return [item for item in manifests if item["apiVersion"] != MONITORING_API]


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
def test_helm_lints_every_example_for(version: str, renderer: Helm) -> None:
    """The oldest and the newest version take both branches of each version check."""
    for path in CI:
        renderer.run("lint", CHART, "--strict", "--kube-version", version, "--values", path)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_example_is_valid_for(version: str, rendered: dict[str, Manifests], validator: Any) -> None:
    """Validation is strict: unknown fields are errors. Objects that several examples share are validated
    once.
    """
    distinct = {json.dumps(item, sort_keys=True): item for found in rendered.values() for item in ours(found)}
    assert len(distinct) > 30
    for item in distinct.values():
        if item["kind"] == "CustomResourceDefinition" and version != KUBERNETES[-1]:
            continue  # long, and the same API since 1.16
        if item["kind"] in POLICY and version == "1.29":
            continue  # left out there, as another test checks
        validator.validate(item, version, strict=True)


@pytest.mark.parametrize(
    ("kubernetes", "values", "is_there"),
    [
        ("1.29.0", {}, False),
        ("1.30.0", {}, True),
        ("1.36.0", {"admissionPolicy": {"enabled": False}}, False),
        ("1.36.0", {"watch": {"namespaces": ["ml"]}}, False),
    ],
)
def test_the_admission_policy_is_there_where_it_is_served(
    renderer: Helm, kubernetes: str, values: dict[str, Any], is_there: bool
) -> None:
    found = [item for item in renderer.template(values, kubernetes=kubernetes) if item["kind"] in POLICY]
    assert [item["kind"] for item in found] == list(POLICY if is_there else ())
    assert len({item["metadata"]["name"] for item in found}) == is_there
    assert all(item["spec"].get("policyName") in (None, item["metadata"]["name"]) for item in found)


def test_the_strict_validation_sees_an_unknown_field(rendered: dict[str, Manifests], validator: Any) -> None:
    wrong = json.loads(json.dumps(named(rendered["default"], "Deployment")))
    wrong["spec"]["template"]["spec"]["serviceAcountName"] = "x"
    with pytest.raises(validator.ValidationError, match="serviceAcountName"):
        validator.validate(wrong, "1.37", strict=True)


def test_a_kubernetes_that_is_too_old_is_refused(renderer: Helm) -> None:
    refused = renderer.attempt("template", "zerotrain", CHART, "--kube-version", "1.28.9")
    assert refused.returncode != 0
    assert "1.29" in refused.stderr


def policy_level(manifests: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return the Pod Security level that policy-guard finds."""
    source, report = folder / "manifests.yaml", folder / "report.json"
    source.write_text(yaml.dump_all(manifests))
    guard = Path(sys.executable).parent / "policy-guard"
    command = [str(guard), "scan", str(source), "-l", "restricted", "-f", "json", "-o", str(report)]
    subprocess.run(command, capture_output=True, check=False)
    found: str = json.loads(report.read_text())["compliant_level"]
    return found


def test_every_pod_is_of_the_restricted_level(rendered: dict[str, Manifests], tmp_path: Path) -> None:
    pods = [item for found in rendered.values() for item in found if item["kind"] in ("Deployment", "Pod")]
    assert len(pods) >= 2 * len(CI) - 1
    assert policy_level(pods, tmp_path) == "restricted"
    planted = json.loads(json.dumps(named(rendered["default"], "Deployment")))
    planted["spec"]["template"]["spec"]["hostNetwork"] = True
    assert policy_level([planted], tmp_path) == "privileged"


def test_every_object_has_its_namespace_and_labels(rendered: dict[str, Manifests]) -> None:
    cluster_scoped = {
        *("CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "PriorityClass"),
        *POLICY,
    }
    for item in (item for found in rendered.values() for item in found):
        assert ("namespace" in item["metadata"]) is (item["kind"] not in cluster_scoped), item["metadata"]


def container(deployment: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


def plain(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a Deployment's pod without what the two ways of installing may differ in: labels, and the names
    of the image, the account and the key.
    """
    spec = json.loads(json.dumps(manifest["spec"]["template"]["spec"]))
    del spec["containers"][0]["image"], spec["volumes"][0]["secret"]["secretName"]
    given = {"ZEROTRAIN_OPERATOR_LEASE", "ZEROTRAIN_OPERATOR_MONITORING_NAMESPACE"}
    spec["containers"][0]["env"] = [
        entry for entry in spec["containers"][0]["env"] if entry["name"] not in given
    ]
    return dict(spec)


def test_the_operator_is_the_one_that_kustomize_installs(rendered: dict[str, Manifests]) -> None:
    kustomized = yaml.safe_load((KUSTOMIZE / "deployment.yaml").read_text())
    chart = named(rendered["default"], "Deployment")
    assert plain(chart) == plain(kustomized)
    given = {entry["name"]: entry.get("value") for entry in container(chart)["env"]}
    options = ResourceOptions()
    assert given["ZEROTRAIN_OPERATOR_LEASE"] == OperatorConfig().lease
    assert given["ZEROTRAIN_OPERATOR_MONITORING_NAMESPACE"] == options.monitoring_namespace


def rules(roles: Sequence[Mapping[str, Any]], folder: Path) -> set[Call]:
    path = folder / "roles.yaml"
    path.write_text(yaml.dump_all(roles))
    return granted([path])


def test_the_roles_grant_what_kustomize_grants(rendered: dict[str, Manifests], tmp_path: Path) -> None:
    """Another test compares the roles of kustomize with every request of the operator, both ways."""
    wanted = granted([KUSTOMIZE / "cluster_role.yaml", KUSTOMIZE / "lease_role.yaml"])
    roles = [item for item in rendered["default"] if item["kind"] in ("ClusterRole", "Role")]
    people = [role for role in roles if role["metadata"]["labels"]["app.kubernetes.io/component"] == "api"]
    assert rules([role for role in roles if role not in people], tmp_path) == wanted
    assert rules(people, tmp_path) == granted([KUSTOMIZE / "user_roles.yaml"])
    assert {
        key for role in people for key in role["metadata"]["labels"] if key.startswith("rbac.authorization")
    } == {f"rbac.authorization.k8s.io/aggregate-to-{name}" for name in ("admin", "edit", "view")}


def test_in_single_namespaces_nothing_is_granted_elsewhere(
    rendered: dict[str, Manifests], renderer: Helm, tmp_path: Path
) -> None:
    found = rendered["namespaced"]
    assert not [item for item in found if item["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    operators = [
        item for item in found if item["kind"] == "Role" and item["metadata"]["name"].endswith("-operator")
    ]
    assert {role["metadata"]["namespace"] for role in operators} == {"research", "production"}
    everything = granted([KUSTOMIZE / "cluster_role.yaml"])
    reads = everything - rules(operators, tmp_path)
    cluster_wide = {"nodes", "priorityclasses", "resourceflavors", "storageclasses"}
    assert {call.resource for call in reads} == cluster_wide
    environ = {entry["name"]: entry.get("value") for entry in container(named(found, "Deployment"))["env"]}
    assert environ["ZEROTRAIN_OPERATOR_NAMESPACES"] == "research,production"

    with_reads = renderer.template({"watch": {"namespaces": ["research"]}})
    cluster_roles = [
        item
        for item in with_reads
        if item["kind"] == "ClusterRole" and item["metadata"]["name"].endswith("-operator")
    ]
    assert rules(cluster_roles, tmp_path) == reads
    assert {call.verb for call in reads} <= {"get", "list", "watch"}


def test_the_operator_reads_every_variable_that_it_is_given(rendered: dict[str, Manifests]) -> None:
    given = {
        entry["name"]: entry.get("value", "x")
        for entry in container(named(rendered["everything"], "Deployment"))["env"]
    }
    config = OperatorConfig.from_env(
        {name: value for name, value in given.items() if name.startswith(PREFIX)}
    )
    assert (config.workers, config.resync_s, config.limits.burst) == (64, 600.0, 200)
    assert config.limits.requests_per_second == 100.0
    assert config.resources.dns_namespace == "dns-system"
    assert config.resources.dns_labels == {"dns": "cluster"}
    assert config.resources.dns_cidrs == ("169.254.20.10/32",)
    assert config.resources.extra_egress_cidrs == ("10.0.0.0/8",)
    assert config.resources.extra_http_cidrs == ("192.168.0.0/16",)
    assert config.resources.rendezvous_timeout_s == 600.0
    assert config.resources.image_pull_policy == "IfNotPresent"
    assert config.resources.monitoring_namespace == "monitoring"
    assert config.http_address == ":8080"


def test_operator_and_workers_find_each_other(rendered: dict[str, Manifests]) -> None:
    """Labels and ports are spelt in Python and in the chart."""
    found = rendered["everything"]
    pod = named(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert ResourceOptions().operator_labels.items() <= pod.items()
    for selector in (
        named(found, "Deployment")["spec"]["selector"]["matchLabels"],
        named(found, "Service")["spec"]["selector"],
        named(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        named(found, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= pod.items()
    ports = [rule["ports"] for rule in named(found, "NetworkPolicy")["spec"]["egress"] if "ports" in rule]
    assert [{"protocol": "TCP", "port": WORKER_HTTP_PORT}] in ports
    (endpoint,) = named(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == (HTTP_PORT_NAME, False)
    (expression,) = named(found, "PodMonitor")["spec"]["selector"]["matchExpressions"]
    assert expression == {"key": LABEL_RANK, "operator": "Exists"}
    (endpoint,) = named(found, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True


def test_operator_and_workers_ask_the_same_dns(rendered: dict[str, Manifests]) -> None:
    for name, manifests in rendered.items():
        given = {
            entry["name"]: entry.get("value", "x")
            for entry in container(named(manifests, "Deployment"))["env"]
            if entry["name"].startswith(PREFIX)
        }
        options = OperatorConfig.from_env(given).resources
        for policy in (item for item in manifests if item["kind"] == "NetworkPolicy"):
            dns = policy["spec"]["egress"][0]["to"]
            assert dns == network_policy(make_job(), options)["spec"]["egress"][1]["to"], name
    assert named(rendered["everything"], "NetworkPolicy")["spec"]["egress"][0]["to"][1] == {
        "ipBlock": {"cidr": "169.254.20.10/32"}
    }


def test_the_test_pod_is_let_in(rendered: dict[str, Manifests]) -> None:
    found = rendered["default"]
    pod = named(found, "Pod")["metadata"]["labels"]
    (rule,) = named(found, "NetworkPolicy")["spec"]["ingress"]
    assert any(
        peer.get("podSelector", {}).get("matchLabels", {"": ""}).items() <= pod.items()
        for peer in rule["from"]
    )
    service = named(found, "Service")
    (entry,) = named(found, "Pod")["spec"]["containers"][0]["env"]
    assert entry == {"name": "SERVICE", "value": service["metadata"]["name"]}


@pytest.mark.parametrize(
    ("enabled", "apis", "wanted"),
    [("auto", (), 0), ("auto", (MONITORING_API,), 1), (True, (), 1), (False, (MONITORING_API,), 0)],
)
def test_monitors_need_their_api_or_an_order(
    renderer: Helm, enabled: str | bool, apis: tuple[str, ...], wanted: int
) -> None:
    kinds = ("podMonitor", "serviceMonitor", "prometheusRule")
    found = renderer.template({kind: {"enabled": enabled} for kind in kinds}, apis=apis)
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert len([item for item in found if item["kind"] == kind]) == wanted
    assert bool([item for item in found if item["kind"] == "PrometheusRule"]) is bool(wanted)


def test_rules_are_those_of_the_files_with_the_values_applied(renderer: Helm) -> None:
    files = sorted((CHART / "files" / "generated" / "rules").glob("*.yaml"))
    alerts = [
        rule["alert"]
        for path in files
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    values = {
        "prometheusRule": {
            "enabled": True,
            "disabled": alerts[:1],
            "alertLabels": {"team": "training", "severity": "never"},
            "runbookBaseUrl": "https://wiki.example.com/runbooks/",
        }
    }
    found = [item for item in renderer.template(values) if item["kind"] == "PrometheusRule"]
    assert len(found) == len(files)
    kept = [
        rule
        for item in found
        for group in item["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert [rule["alert"] for rule in kept] == alerts[1:]
    for rule in kept:
        assert rule["labels"]["team"] == "training"
        assert rule["labels"]["severity"] != "never", "a rule's own label wins"
        assert rule["annotations"]["runbook_url"].startswith("https://wiki.example.com/runbooks/ZeroTrain")

    plainly = [
        item
        for item in renderer.template({"prometheusRule": {"enabled": True}})
        if item["kind"] == "PrometheusRule"
    ]
    own = '{namespace="zerotrain-system"}'
    groups = [
        json.loads(json.dumps(item["spec"]["groups"]).replace(json.dumps(own)[1:-1], "")) for item in plainly
    ]
    for path in files:
        assert yaml.safe_load(path.read_text())["groups"] in groups


def test_dashboards_are_those_of_the_files(rendered: dict[str, Manifests]) -> None:
    files = {
        path.name: json.loads(path.read_text())
        for path in (CHART / "files" / "generated" / "dashboards").glob("*.json")
    }
    maps = [
        item
        for item in rendered["default"]
        if item["kind"] == "ConfigMap" and item["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    found = {name: json.loads(text) for item in maps for name, text in item["data"].items()}
    assert found == {f"zerotrain-{name}": dashboard for name, dashboard in files.items()}


def test_the_custom_resource_is_the_generated_one(renderer: Helm, rendered: dict[str, Manifests]) -> None:
    source = yaml.load(
        (REPOSITORY / "crds" / "zerotrain.dev_zerotrainingjobs.yaml").read_text(), Loader=yaml.CSafeLoader
    )
    kept = named(rendered["default"], "CustomResourceDefinition")
    assert kept["spec"] == source["spec"]
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    loose = named(
        renderer.template({"crds": {"keep": False, "annotations": {"a": "b"}}}), "CustomResourceDefinition"
    )
    assert loose["metadata"]["annotations"] == {"a": "b"}
    assert not [item for item in rendered["minimal"] if item["kind"] == "CustomResourceDefinition"]


def test_a_digest_takes_the_tags_place(rendered: dict[str, Manifests], renderer: Helm) -> None:
    assert container(named(rendered["everything"], "Deployment"))["image"].endswith(
        "operator@sha256:" + "0123456789abcdef" * 4
    )
    untagged = renderer.template({"image": {"tag": ""}})
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(named(untagged, "Deployment"))["image"] == f"localhost/zerotrain:{version}"


def test_names_follow_the_release_and_stay_short(renderer: Helm) -> None:
    values = {"fullnameOverride": "a" * 40}
    found = renderer.template(values)
    labels = [item for item in found if item["kind"] in ("Deployment", "Pod", "Service")]
    assert max(len(item["metadata"]["name"]) for item in labels) <= 63
    assert (
        named(found, "Deployment")["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        == "zerotrain"
    )
