"""Instances of the control plane: they start, stop and run side by side, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devcluster import BIN, ClusterError, Devcluster, open_kubeconfig, wait_until

pytestmark = pytest.mark.cluster


def processes_of(root: Path) -> dict[int, str]:
    """Return command lines of live processes that mention the root, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(root) in command:
            found[int(entry.name)] = command
    return found


def port_is_open(url: str) -> bool:
    port = int(url.rsplit(":", 1)[1])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_instances_run_side_by_side_and_leave_nothing_behind(
    devcluster: Devcluster, tmp_path: Path
) -> None:
    # A long root: sockets have a limit of 108 bytes, instances have not.
    here = Devcluster(root=tmp_path / ("long" * 30))
    with here.lease("control-plane") as one, here.lease("control-plane") as two:
        one.kubectl("create", "namespace", "only-here")
        assert one.api_url != two.api_url
        assert two.kubectl("get", "namespace", "only-here", check=False).returncode != 0
        # Each instance trusts only its own authority.
        stranger = two.kubectl("--server", one.api_url, "get", "namespaces", check=False)
        assert stranger.returncode != 0
        assert "certificate" in stranger.stderr
        assert processes_of(here.root)
    assert processes_of(here.root) == {}
    assert list(here.root.iterdir()) == []
    assert not port_is_open(one.api_url)
    assert not port_is_open(two.api_url)


@pytest.mark.usefixtures("simulated_cluster")
def test_up_is_idempotent_and_refuses_another_profile(devcluster: Devcluster) -> None:
    with devcluster.lease("control-plane") as cluster:
        pids = {c["name"]: c["pid"] for c in devcluster.status(cluster.name)["components"]}
        again = devcluster.up("control-plane", cluster.name)
        assert again == cluster
        assert {c["name"]: c["pid"] for c in devcluster.status(cluster.name)["components"]} == pids
        with pytest.raises(ClusterError, match="is running with --profile control-plane, not simulated"):
            devcluster.up("simulated", cluster.name)


def test_up_waits_for_a_start_that_someone_else_has_begun(devcluster: Devcluster, tmp_path: Path) -> None:
    here = Devcluster(root=tmp_path)
    command = here.command("up", "--owner-pid", str(os.getpid()), name="shared")
    try:
        starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        texts = [start.communicate()[0] for start in starts]
        assert [start.returncode for start in starts] == [0, 0]
        assert sorted("running already" in text for text in texts) == [False, True]
        # The one that only waited has not returned too early.
        open_kubeconfig(tmp_path / "shared" / "kubeconfig", (str(BIN / "devcluster"), "kubectl")).get(
            "namespaces"
        )
    finally:
        here.down("shared")


def test_alpha_apis_can_be_switched_on(devcluster: Devcluster) -> None:
    gates = ("--feature-gates", "GenericWorkload=true,GangScheduling=true")
    with devcluster.lease(
        "control-plane", *gates, "--runtime-config", "scheduling.k8s.io/v1alpha2=true"
    ) as cluster:
        assert "podgroups" in cluster.kubectl("api-resources", "--api-group", "scheduling.k8s.io").stdout


def test_api_server_can_be_stopped_and_started(devcluster: Devcluster) -> None:
    with devcluster.lease("control-plane") as cluster:
        cluster.kubectl("create", "namespace", "kept")
        component = ("--component", "kube-apiserver")
        subprocess.run(
            devcluster.command("stop-component", *component, "--kill", name=cluster.name), check=True
        )
        assert cluster.kubectl("get", "namespaces", check=False).returncode != 0
        states = {c["name"]: c["state"] for c in devcluster.status(cluster.name)["components"]}
        assert states["kube-apiserver"] == "stopped"
        assert states["etcd"] == "running"
        subprocess.run(devcluster.command("start-component", *component, name=cluster.name), check=True)
        cluster.kubectl("get", "namespace", "kept")


def test_a_component_that_crashes_comes_back(devcluster: Devcluster) -> None:
    with devcluster.lease("control-plane") as cluster:

        def scheduler() -> dict[str, object]:
            components = devcluster.status(cluster.name)["components"]
            return next(c for c in components if c["name"] == "kube-scheduler")

        first = scheduler()["pid"]
        assert isinstance(first, int)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: scheduler()["restarts"] == 1 and scheduler()["state"] == "running", "a restart")
        assert scheduler()["pid"] != first
        assert scheduler()["lastExit"] == "signal: killed"


def test_killing_the_supervisor_ends_everything_and_up_recovers(
    devcluster: Devcluster, tmp_path: Path
) -> None:
    here = Devcluster(root=tmp_path)
    with here.lease("control-plane") as cluster:
        (supervisor,) = [pid for pid, line in processes_of(here.root).items() if " supervise " in line]
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: not processes_of(here.root), "the components to end with their supervisor")
        again = here.up("control-plane", cluster.name)
        assert again.api_url != cluster.api_url or again.token != cluster.token


def test_instance_ends_with_its_owner(devcluster: Devcluster, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as owner:
        here = Devcluster(root=tmp_path)
        command = here.command("up", "--owner-pid", str(owner.pid), name="owned")
        subprocess.run(command, check=True, capture_output=True)
        assert processes_of(here.root)
        owner.kill()
    wait_until(lambda: not processes_of(here.root) and not list(here.root.iterdir()), "the instance to end")


def test_failed_start_names_the_component_and_cleans_up(devcluster: Devcluster, tmp_path: Path) -> None:
    here = Devcluster(root=tmp_path)
    with pytest.raises(ClusterError) as caught:
        here.up("control-plane", "broken", "--feature-gates", "NoSuchGate=true")
    text = str(caught.value)
    assert "kube-apiserver: ended during start" in text
    assert "NoSuchGate" in text, "the end of its log"
    assert "What to do:" in text
    assert processes_of(here.root) == {}
    assert list(here.root.iterdir()) == []


def test_an_interrupted_start_leaves_nothing(devcluster: Devcluster, tmp_path: Path) -> None:
    here = Devcluster(root=tmp_path)
    command = here.command("up", name="interrupted")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as start:
        assert start.stdout is not None
        assert start.stderr is not None
        assert "etcd ready" in start.stdout.readline()
        start.send_signal(signal.SIGINT)
        assert "interrupted" in start.stderr.read()
    assert start.returncode == 1
    assert processes_of(here.root) == {}
    assert list(here.root.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--name", "Bad_Name"], '--name "Bad_Name"'),
        (["--profile", "cloud"], '--profile "cloud": must be one of'),
        (["--profile", "simulated", "--bin-dir", "/nonexistent"], "lacks kwok"),
        (["--image", "/nonexistent.tar"], "--image"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(
    devcluster: Devcluster, tmp_path: Path, flags: list[str], message: str
) -> None:
    here = Devcluster(root=tmp_path / "root")
    result = subprocess.run(here.command("up", *flags), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert message in result.stderr
    assert not here.root.exists()


def test_down_of_nothing_is_no_error(devcluster: Devcluster, tmp_path: Path) -> None:
    assert "is not running" in Devcluster(root=tmp_path).down("nothing")
