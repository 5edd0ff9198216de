"""The pod that verifies a checkpoint: restricted, read-only, no worker; its program's output gives the
result.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_states import layout_for, make_state
from tests.support.devcluster import Cluster
from tests.support.jobs import make_job
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_JOB, LABEL_JOB_UID, LABEL_RANK
from zerotrain.operator.reconcile import pod_view
from zerotrain.operator.resources import ResourceOptions, network_policy
from zerotrain.operator.resources.verification import (
    COMMAND,
    HELPER,
    verification_pod,
    verification_pod_name,
)
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import Owner, SingleRank

TAG = "step-0000000100-attempt-1"


def pod(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    job = make_job(changes)
    return verification_pod(job, verification_pod_name(job.name, 1, 1), TAG, 600, ResourceOptions())


@pytest.mark.unit
def test_it_reads_the_jobs_folder_and_can_write_nothing() -> None:
    (container,) = pod()["spec"]["containers"]
    assert container["command"][-2:] == ["/checkpoints/gpt", TAG]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"/checkpoints": True, "/tmp": False}
    sources = {volume["name"]: volume for volume in pod()["spec"]["volumes"]}
    assert sources["zerotrain-checkpoint"]["persistentVolumeClaim"]["claimName"] == "ckpt"
    assert sources["zerotrain-tmp"]["emptyDir"] == {"sizeLimit": "64Mi"}


@pytest.mark.unit
def test_no_quota_on_processors_or_memory_refuses_it_for_what_it_does_not_say() -> None:
    (container,) = pod()["spec"]["containers"]
    assert (
        container["resources"]["requests"].keys()
        == container["resources"]["limits"].keys()
        == {"cpu", "memory"}
    )


@pytest.mark.unit
def test_no_deletion_or_budget_of_an_attempt_takes_it_for_a_worker() -> None:
    labels = pod()["metadata"]["labels"]
    assert not {LABEL_ATTEMPT, LABEL_RANK} & labels.keys()
    view = pod_view({**pod(), "metadata": {**pod()["metadata"], "uid": "u"}}, seen_at=None)  # type: ignore[arg-type]
    assert view is not None
    assert view.helper == HELPER


@pytest.mark.unit
def test_the_jobs_network_policy_applies_to_it() -> None:
    selected = network_policy(make_job(), ResourceOptions())["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= pod()["metadata"]["labels"].items()
    assert {LABEL_JOB, LABEL_JOB_UID} == selected.keys()


@pytest.mark.unit
def test_it_goes_where_the_workers_may_go_without_their_gpus() -> None:
    made = pod(
        {
            "spec.scheduling": {"nodeSelector": {"pool": "a"}, "tolerations": [{"key": "gpu"}]},
            "spec.podTemplate": {"imagePullSecrets": [{"name": "pull"}], "serviceAccountName": "trainer"},
            "spec.resources": {"gpus": {"count": 2}, "memory": "8Gi"},
        }
    )["spec"]
    assert made["nodeSelector"] == {"pool": "a"}
    assert made["tolerations"] == [{"key": "gpu"}]
    assert made["imagePullSecrets"] == [{"name": "pull"}]
    assert made["serviceAccountName"] == "trainer"
    assert "nvidia.com/gpu" not in str(made["containers"])
    assert made["automountServiceAccountToken"] is False
    assert made["activeDeadlineSeconds"] == 600


@pytest.mark.cluster
def test_pod_security_restricted_takes_it(control_plane: Cluster, namespace: str) -> None:
    control_plane.kubectl("label", "ns", namespace, "pod-security.kubernetes.io/enforce=restricted")
    made = pod({"metadata.namespace": namespace})
    made["metadata"].pop("ownerReferences")
    control_plane.apply(made)


@pytest.mark.ranks
def test_its_program_distinguishes_whole_from_damaged(tmp_path: Path) -> None:
    layout = layout_for(1)
    checkpoint.save(
        make_state(0, layout), tmp_path, step=100, owner=Owner(attempt=1), group=SingleRank(), keep_last=None
    )
    assert run(tmp_path, TAG).returncode == ExitCode.DONE
    (file,) = (tmp_path / TAG).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = run(tmp_path, TAG)
    assert damaged.returncode == ExitCode.CHECKPOINT_UNUSABLE
    assert f"{file.name} does not have the digest" in damaged.stdout.splitlines()[-1]
    missing = run(tmp_path, "step-0000000200-attempt-1")
    assert missing.returncode == ExitCode.CHECKPOINT_UNUSABLE, missing.stderr
    assert f"{tmp_path} holds no step-0000000200-attempt-1" in missing.stdout.splitlines()[-1]


def run(folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *COMMAND[1:], str(folder), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
