"""deploy/kustomize: accepted without a warning, no right beyond what is used, and one word for one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.devcluster import REPOSITORY, Cluster
from zerotrain.operator.handlers.config import PREFIX, OperatorConfig
from zerotrain.operator.resources import ResourceOptions

FOLDER = REPOSITORY / "deploy" / "kustomize"

USED = {
    # kopf lists and watches, a conflict and a resync get and list, a time to live deletes
    ("zerotrain.dev", "zerotrainingjobs"): {"get", "list", "watch", "delete"},
    ("zerotrain.dev", "zerotrainingjobs/status"): {"update"},
    # the reflector lists and watches, an AlreadyExists gets, an attempt goes at once, a hung pod alone
    ("", "pods"): {"get", "list", "watch", "create", "delete", "deletecollection"},
    ("", "services"): {"get", "create"},
    ("", "configmaps"): {"get", "create", "patch"},
    ("", "secrets"): {"create"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create"},
    ("events.k8s.io", "events"): {"create"},
}


def documents(name: str) -> list[dict[str, Any]]:
    return [dict(item) for item in YAML(typ="safe", pure=True).load_all(Path(FOLDER, name).read_text())]


def test_the_role_holds_what_the_operator_does_and_nothing_else() -> None:
    (role,) = documents("cluster_role.yaml")
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault((group, resource), set()).update(rule["verbs"])
    assert granted == USED


def test_the_workers_network_policy_lets_this_deployment_in() -> None:
    (deployment,) = documents("deployment.yaml")
    options = ResourceOptions()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["metadata"]["namespace"] == options.operator_namespace
    assert options.operator_labels.items() <= labels.items()


def test_the_deployment_sets_only_variables_that_are_read(tmp_path: Path) -> None:
    (deployment,) = documents("deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "given") for entry in container["env"]}
    ours = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    config = OperatorConfig.from_env(ours)
    assert (config.namespace, config.identity) == ("given", "given")
    assert str(config.key_file) == "/etc/zerotrain/key/key"
    assert config.http_address == "0.0.0.0:8080"
    assert len(ours) == 4


@pytest.mark.cluster
def test_the_api_server_takes_them_without_a_warning(
    control_plane: Cluster, operator_kubeconfig: Path
) -> None:
    """The namespace enforces and warns by Pod Security "restricted", so a pod that is not would be told."""
    applied = control_plane.kubectl("apply", "--dry-run=server", "-k", str(FOLDER))
    assert "Warning" not in applied.stderr
    assert "deployment.apps/zerotrain-operator created" in applied.stdout
