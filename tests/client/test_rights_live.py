"""Commands of users with some rights and not others, on a real API server: the requests, and what remains
possible.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import zerotrain
from tests.support.crd import install_crd
from tests.support.devcluster import Cluster
from tests.support.jobs import job_json
from zerotrain.client import Client
from zerotrain.client.command_exits import CommandExit

pytestmark = pytest.mark.cluster

JOB = "gpt"
POLICIES = "networkpolicies.networking.k8s.io"


def allow(cluster: Cluster, namespace: str, verbs: str, resource: str) -> None:
    """Grant the verbs on the resource to the user of `nobody`, in this namespace."""
    name = f"{verbs}-{resource}".replace(",", "-")
    cluster.kubectl("create", "role", name, f"--verb={verbs}", f"--resource={resource}", "-n", namespace)
    user = f"--serviceaccount={namespace}:nobody"
    cluster.kubectl("create", "rolebinding", name, f"--role={name}", user, "-n", namespace)


def names(cluster: Cluster, namespace: str, resource: str) -> list[str]:
    return cluster.kubectl("get", resource, "-n", namespace, "-o", "name").stdout.split()


def test_a_dry_run_of_the_server_asks_it_and_deletes_nothing(
    control_plane: Cluster, namespace: str, unprivileged: Path
) -> None:
    install_crd(control_plane)
    control_plane.apply(job_json({"metadata": {"name": JOB}}), namespace=namespace)
    before = Client.connect(control_plane.kubeconfig, namespace=namespace).get(JOB)
    command = ("delete", JOB, "--dry-run", "server", "-n", namespace)
    done = zerotrain(*command, kubeconfig=control_plane.kubeconfig)
    assert (done.code, done.out) == (0, f"{JOB} deleted (server dry run)\n"), done.err
    after = Client.connect(control_plane.kubeconfig, namespace=namespace).get(JOB)
    assert after.uid == before.uid
    assert "deletionTimestamp" not in after.raw["metadata"]

    allow(control_plane, namespace, "get,list", "zerotrainingjobs.zerotrain.dev")
    done = zerotrain(*command, kubeconfig=unprivileged)
    assert done.code == CommandExit.FORBIDDEN, done.out + done.err
    assert "cannot delete" in done.err
    assert done.out == ""
    # A user who may read only the job is shown what the job alone says.
    diagnosis = Client.connect(unprivileged, namespace=namespace).describe(JOB)
    assert diagnosis.headline.startswith(JOB)
    assert diagnosis.happenings == ()


def test_doctor_leaves_no_policies_of_a_user_who_may_make_no_pods(
    control_plane: Cluster, namespace: str, unprivileged: Path
) -> None:
    allow(control_plane, namespace, "create,delete", POLICIES)
    command = ("doctor", "--pod", "--image", "example.org/zerotrain:1", "-n", namespace)
    done = zerotrain(*command, kubeconfig=unprivileged)
    assert done.code == CommandExit.FORBIDDEN, done.err
    assert 'cannot create resource "pods"' in done.err
    assert "pods, pods/log and networkpolicies" in done.err
    assert "could not be deleted" not in done.err
    assert names(control_plane, namespace, POLICIES) == []


def test_doctor_names_what_a_user_may_not_delete(
    control_plane: Cluster, namespace: str, unprivileged: Path
) -> None:
    allow(control_plane, namespace, "create", POLICIES)
    command = ("doctor", "--pod", "--image", "example.org/zerotrain:1", "-n", namespace)
    done = zerotrain(*command, kubeconfig=unprivileged)
    assert done.code == CommandExit.FORBIDDEN, done.err
    left = names(control_plane, namespace, POLICIES)
    assert len(left) == 2
    for name in left:
        assert f"networkpolicies/{name.split('/')[1]}" in done.err
    assert f"kubectl delete -n {namespace} networkpolicies/" in done.err
