"""The node as an ordinary user: it runs without root, and reports what is missing where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.devcluster import BIN, IMAGES, Devcluster, open_kubeconfig, wait_until

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user; not root already is one"),
]

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """Provide a folder of that user with readable tools; those of the cache are in another user's home."""
    folder = Path(tempfile.mkdtemp(prefix="devcluster-user-"))
    (folder / "bin").mkdir()
    (folder / "images").mkdir()
    for tool in BIN.iterdir():
        shutil.copy(tool, folder / "bin")
    shutil.copy(IMAGES / "pause.tar", folder / "images")
    for path in (folder, folder / "bin", folder / "images"):
        path.chmod(0o755)
    (folder / "instances").mkdir()
    os.chown(folder / "instances", NOBODY, NOBODY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_unprivileged_user(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "HOME": str(place)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def program(place: Path, devcluster: Devcluster, node_tools: None) -> Devcluster:
    return Devcluster(root=place / "instances", program=place / "bin" / "devcluster")


def test_pods_run_without_root(place: Path, program: Devcluster) -> None:
    up = as_unprivileged_user(program.command("up", "--profile", "node", name="user"), place)
    if up.returncode == 3:
        pytest.skip(up.stderr.strip())
    try:
        assert up.returncode == 0, up.stderr
        assert "no CPU or memory limits" in up.stdout
        kubectl = (str(program.program), "kubectl")
        cluster = open_kubeconfig(program.root / "user" / "kubeconfig", kubectl)
        # Settings of our pods that one user id cannot provide: owners of volumes and tokens, limits.
        spec = {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "main",
                    "image": "localhost/pause:1",
                    "imagePullPolicy": "Never",
                    "resources": {"limits": {"cpu": "1", "memory": "64Mi"}},
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                }
            ],
            "volumes": [{"name": "scratch", "emptyDir": {}}],
        }
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "small"}, "spec": spec})
        wait_until(lambda: cluster.get("pod", "small")["status"]["phase"] == "Running", "the pod to run")
    finally:
        down = as_unprivileged_user(program.command("down", name="user"), place)
    assert down.returncode == 0, down.stderr
    assert list(program.root.iterdir()) == []


def test_blocked_user_namespaces_are_named_with_the_way_out(place: Path, program: Devcluster) -> None:
    blocked = place / "blocked"
    blocked.write_text("0\n")
    gate = "/proc/sys/user/max_user_namespaces"
    up = " ".join(program.command("up", "--profile", "node", name="user"))
    # In a mount namespace of its own, the machine's setting reads as 0.
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    script = f"mount --bind {blocked} {gate} && exec {become} {up}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 3
    assert f"{gate} is 0" in result.stderr
    assert "sysctl user.max_user_namespaces=10000" in result.stderr
    assert "--profile control-plane" in result.stderr
    assert list(program.root.iterdir()) == []


def test_a_masked_proc_is_named(place: Path, program: Devcluster) -> None:
    up = " ".join(program.command("up", "--profile", "node", name="user"))
    become = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    script = f"mount -t tmpfs tmpfs /proc/sys/fs && exec {become} {up}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 3
    assert "mounting /proc" in result.stderr
    assert "run this command as root" in result.stderr
    assert list(program.root.iterdir()) == []
