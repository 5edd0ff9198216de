"""deploy/kustomize: accepted without a warning, no right beyond what is used, and consistent names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.operator.call_record import granted
from tests.support.devcluster import REPOSITORY, Cluster
from zerotrain.operator.controller.config import PREFIX, OperatorConfig
from zerotrain.operator.resources import ResourceOptions

FOLDER = REPOSITORY / "deploy" / "kustomize"


def documents(name: str) -> list[dict[str, Any]]:
    return [dict(item) for item in YAML(typ="safe", pure=True).load_all(Path(FOLDER, name).read_text())]


@pytest.mark.unit
def test_the_role_names_every_right_and_no_dangerous_one() -> None:
    """`operator/live/test_rbac.py` judges that the role grants what is used and nothing else."""
    granted_rights = granted([FOLDER / "cluster_role.yaml", FOLDER / "lease_role.yaml"])
    assert not [right for right in granted_rights if "*" in (right.verb, right.group, right.resource)]
    assert {right.verb for right in granted_rights if right.resource == "secrets"} == {"create"}
    assert not {"escalate", "bind", "impersonate"} & {right.verb for right in granted_rights}
    changed = {right.resource for right in granted_rights if right.verb not in ("get", "list", "watch")}
    assert not {"nodes", "pods/exec", "pods/ephemeralcontainers", "serviceaccounts", "clusterroles"} & changed


@pytest.mark.unit
def test_the_workers_network_policy_lets_this_deployment_in() -> None:
    (deployment,) = documents("deployment.yaml")
    options = ResourceOptions()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["metadata"]["namespace"] == options.operator_namespace
    assert options.operator_labels.items() <= labels.items()


@pytest.mark.unit
def test_the_deployment_sets_only_variables_that_are_read(tmp_path: Path) -> None:
    (deployment,) = documents("deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry.get("value", "given") for entry in container["env"]}
    ours = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    config = OperatorConfig.from_env(ours)
    assert (config.namespace, config.identity) == ("given", "given")
    assert str(config.key_file) == "/etc/zerotrain/key/key"
    assert config.http_address == ":8080"
    assert len(ours) == 4


@pytest.mark.unit
def test_the_deployment_has_glibc_return_the_buffers_of_connections() -> None:
    (deployment,) = documents("deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    size_of_a_connections_buffer = 256 << 10
    assert 0 < int(env["MALLOC_MMAP_THRESHOLD_"]) <= size_of_a_connections_buffer


@pytest.mark.cluster
def test_the_api_server_takes_them_without_a_warning(
    control_plane: Cluster, operator_kubeconfig: Path
) -> None:
    """The namespace enforces and warns by Pod Security "restricted", so a violating pod would give a
    warning.
    """
    applied = control_plane.kubectl("apply", "--dry-run=server", "-k", str(FOLDER))
    assert "Warning" not in applied.stderr
    assert "deployment.apps/zerotrain-operator created" in applied.stdout


@pytest.mark.cluster
def test_server_side_apply_takes_them_over_from_client_side_apply(
    control_plane: Cluster, operator_kubeconfig: Path
) -> None:
    """An atomic value that is left out here and filled in by the API server would give a conflict."""
    control_plane.kubectl("apply", "-k", str(FOLDER))
    taken = control_plane.kubectl("apply", "--server-side", "-k", str(FOLDER), check=False)
    assert (taken.returncode, taken.stderr) == (0, "")
