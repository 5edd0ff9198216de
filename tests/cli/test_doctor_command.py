"""`zerotrain doctor` and `env`: their findings match the machine; their pods are restricted and removed
again.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.support.devcluster import Cluster
from tests.support.ports import closed_port
from zerotrain.cli.doctor import accelerators, drive, machine, network, pods
from zerotrain.cli.doctor.finding import Finding, State, from_records, to_records, worst
from zerotrain.cli.env import HIDDEN, variables
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.client import Client


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {item.name: item for item in findings}


@pytest.mark.unit
def test_the_local_checks_for_programs_and_their_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path), "-o", "json"])
    found = from_records(json.loads(done.output))
    assert {item.group for item in found} == {
        *("drive", "kernel", "memory", "processor", "gpu", "nccl", "network")
    }
    assert done.exit_code == (1 if worst(found) is State.FAIL else 0)
    assert list(tmp_path.iterdir()) == [], "something was left behind"
    assert to_records(found) == json.loads(done.output)
    missing = CliRunner().invoke(app, ["doctor", "--folder", "/nowhere", "-o", "json"])
    assert missing.exit_code == 1


@pytest.mark.unit
def test_the_engine_of_the_spill_is_the_reported_one(tmp_path: Path) -> None:
    from zerotrain.runtime._native import SpillFile

    file = SpillFile([str(tmp_path)], 1 << 20)
    engine = file.engine
    file.close()
    assert by_name(drive.drive(tmp_path))["I/O engine"].value == engine


@pytest.mark.unit
def test_memory_in_place_of_a_drive_is_reported() -> None:
    if drive.file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert by_name(drive.drive(Path("/dev/shm")))["file system"].state is State.WARN


@pytest.mark.unit
def test_file_systems_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    place = str(tmp_path)
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:5 / {place} rw shared:1 - xfs /dev/b rw\n"
        f"3 1 0:6 / {place}-other rw - btrfs /dev/c rw\n"
    )
    assert drive.file_system(tmp_path / "deeper", mounts) == "xfs"
    assert drive.file_system(Path("/usr"), mounts) == "ext4"


@pytest.mark.unit
def test_an_io_uring_that_is_refused_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "io_uring_answer", lambda: os.strerror(errno.EPERM))
    found = by_name(machine.kernel())["io_uring"]
    assert (found.state, found.value) == (State.WARN, os.strerror(errno.EPERM))
    assert "libaio" in found.note


@pytest.mark.unit
def test_what_the_kernel_files_say(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/status": "Seccomp:\t2\nCapEff:\t0000000000000000\n",
        "proc/self/cgroup": "",
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 500 kB\nHugePages_Total:       8\n",
        "proc/swaps": "Filename Type Size Used Priority\n/dev/b partition 1 0 -2\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/node/node0/cpulist": "0-3,8\n",
        "sys/devices/system/node/node1/cpulist": f"{max(os.sched_getaffinity(0)) + 100}\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert by_name(machine.kernel(tmp_path))["seccomp"].value == "filter"
    found = by_name(machine.memory(tmp_path))
    assert found["swap"].state is State.WARN
    assert (found["huge pages"].state, found["huge pages"].value) == (
        State.WARN,
        "transparent: never, reserved: 8",
    )
    assert by_name(machine.processor(tmp_path))["NUMA"].value.startswith("2 nodes")


@pytest.mark.ranks
def test_policies_are_checked_by_what_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closed_port() as port:
        is_open = f"127.0.0.1:{server.getsockname()[1]}"
        closed = f"127.0.0.1:{port}"
        assert [item.state for item in network.reach([is_open], [closed])] == [State.OK, State.OK]
        leaky = network.reach([is_open], [is_open])
        assert [item.state for item in leaky] == [State.OK, State.WARN]
        assert "not enforced" in leaky[1].note


@pytest.mark.unit
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_cpu_that_is_slow_at_narrow_products_is_reported(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("ranks compute on the GPUs")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # as slow as a CPU without AVX-512
    found = by_name(accelerators.narrow_products())[f"{dtype} products"]
    assert (found.group, found.state) == ("processor", State.WARN)
    assert f"set {dtype}.enabled to false" in found.note


@pytest.mark.ranks
def test_nothing_reached_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE_S", 0.0)
    with closed_port() as port:
        closed = f"127.0.0.1:{port}"
        assert [item.state for item in network.reach([closed], [closed])] == [State.FAIL, State.SKIP]


REQUEST = pods.PodRequest(
    image="example.org/zerotrain:1", node="n1", storage_class="fast", size="2Gi", gpus=2, timeout_s=60.0
)


@pytest.mark.cluster
def test_pods_and_policies_are_restricted_valid_and_go_again(control_plane: Cluster) -> None:
    """The doctor's pods pass a namespace that enforces the restricted level, on a real API server.

    Nothing runs there, so the command ends with the reason, and nothing is left.
    """
    with control_plane.namespace() as namespace:
        client = Client.connect(control_plane.kubeconfig, None, namespace)
        label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
        client.transport.patch(f"/api/v1/namespaces/{namespace}", label, what="namespace")
        request = pods.PodRequest(
            image=REQUEST.image, node=None, storage_class=None, size="1Gi", gpus=0, timeout_s=0.1
        )
        examination = pods.Examination(client, request, on_progress=lambda text: None)
        try:
            with pytest.raises(CliError, match="did not finish"):
                examination.run()
            examination._create("v1", "pods", examination._peer("10.0.0.1"))
            made = client.transport.get(f"/api/v1/namespaces/{namespace}/pods", what="pods")["items"]
            assert len(made) == 2
            assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in made)
        finally:
            examination.clean_up()
        for path in ("api/v1", "apis/networking.k8s.io/v1"):
            plural = "pods" if path == "api/v1" else "networkpolicies"
            left = client.transport.get(f"/{path}/namespaces/{namespace}/{plural}", what=plural)["items"]
            assert left == []


@pytest.mark.unit
def test_the_examined_pod_has_what_was_requested() -> None:
    unused: Any = None
    body = pods.Examination(unused, REQUEST, on_progress=lambda text: None)._server()
    spec = body["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "n1"}
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    claim = spec["volumes"][1]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", "2Gi")


@pytest.mark.unit
def test_env_names_versions_and_hides_what_may_be_secret() -> None:
    done = CliRunner().invoke(
        app, ["env", "-o", "json"], env={"NCCL_DEBUG": "WARN", "ZEROTRAIN_TOKEN": "s3cret"}
    )
    facts = json.loads(done.output)
    assert {"zerotrain", "torch", "kubernetes"} <= set(facts["packages"])
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    assert facts["variables"]["ZEROTRAIN_TOKEN"] == HIDDEN
    assert "s3cret" not in done.output
    assert variables({"AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root"}) == {}
