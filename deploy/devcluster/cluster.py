"""Start and stop of a cluster for `make cluster-up`, the demonstration and the tests.

The caller chooses one of three: the development cluster of this folder, `kind` for users with Docker
(deploy/kind), or an existing cluster (ZEROTRAIN_TEST_KUBECONFIG).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "devcluster"
BIN = BUILD / "bin"
TOOL_BIN = ROOT / "build" / "tools" / "bin"
INSTANCES = BUILD / "instances"
HOST_IMAGE = BUILD / "images" / "host.tar"
HOST_IMAGE_NAME = "localhost/zerotrain:dev"
EXISTING = "ZEROTRAIN_TEST_KUBECONFIG"


class ClusterError(RuntimeError):
    """No cluster is available; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A running cluster: how to reach it, and the kubectl to use."""

    name: str
    kubeconfig: Path
    kubectl: tuple[str, ...]
    """Command and leading arguments."""


def build(profile: str, *, image: bool) -> None:
    """Build the profile's programs, and the image of the pods, unless the cache holds them."""
    steps = [["tools", "--profile", profile]] + ([["image"]] if image else [])
    for step in steps:
        _run([sys.executable, str(ROOT / "deploy" / "devcluster" / "build.py"), *step])


def build_tool(tool: str) -> Path:
    """Build a tool (`helm`, `kueue`, `monitoring`) unless the cache holds it.

    Returns the folder that its programs are linked in.
    """
    _run([sys.executable, str(ROOT / "deploy" / "devcluster" / "build.py"), "tools", "--tool", tool])
    return TOOL_BIN


def up(profile: str, name: str, *, extra: Sequence[str] = ()) -> Cluster:
    """Build what is missing and start an instance; return when it is Ready."""
    with_image = profile == "node"
    build(profile, image=with_image)
    images = ["--image", str(HOST_IMAGE)] if with_image else []
    _run(
        [
            str(BIN / "devcluster"),
            "up",
            "--profile",
            profile,
            *_place(name),
            "--bin-dir",
            str(BIN),
            *images,
            *extra,
        ]
    )
    return running(name)


def running(name: str) -> Cluster:
    """Return the handle of a running instance, without checking that it runs."""
    return Cluster(
        name=name,
        kubeconfig=INSTANCES / name / "kubeconfig",
        kubectl=(str(BIN / "devcluster"), "kubectl"),
    )


def down(name: str) -> None:
    """Stop an instance and remove its folder."""
    _run([str(BIN / "devcluster"), "down", *_place(name)])


def existing() -> Cluster | None:
    """Return the cluster of ZEROTRAIN_TEST_KUBECONFIG; None if the variable is not set."""
    path = os.environ.get(EXISTING)
    if not path:
        return None
    if not Path(path).is_file():
        raise ClusterError(f"{EXISTING}={path} is not a file; unset it or give a kubeconfig")
    kubectl = shutil.which("kubectl")
    if kubectl is None and not (BIN / "devcluster").exists():
        raise ClusterError(
            "there is no kubectl on PATH; install it, or run `make cluster-up PROFILE=control-plane` once, "
            "which builds one"
        )
    command = (kubectl,) if kubectl else (str(BIN / "devcluster"), "kubectl")
    return Cluster(name="existing", kubeconfig=Path(path), kubectl=command)


def kind_up(name: str) -> Cluster:
    """Start a cluster with kind, which needs docker, kind and kubectl on PATH."""
    missing = [tool for tool in ("docker", "kind", "kubectl") if shutil.which(tool) is None]
    if missing:
        raise ClusterError(
            f"CLUSTER=kind needs {', '.join(missing)} on PATH; install them or use the default cluster"
        )
    _run(["bash", str(ROOT / "deploy" / "kind" / "up.sh"), name])
    return Cluster(name=name, kubeconfig=BUILD.parent / "kind" / f"{name}.kubeconfig", kubectl=("kubectl",))


def kind_down(name: str) -> None:
    _run(["kind", "delete", "cluster", "--name", name])


@contextmanager
def lease(kind: str, name: str, *, keep: bool = False) -> Iterator[Cluster]:
    """Provide a node cluster within the block. `kind` is `devcluster` or `kind`."""
    found = existing()
    if found is not None:
        yield found
        return
    # An instance with an owner stops when the owner process ends in any way.
    owner = [] if keep else ["--owner-pid", str(os.getpid())]
    cluster = kind_up(name) if kind == "kind" else up("node", name, extra=owner)
    try:
        yield cluster
    finally:
        if not keep:
            (kind_down if kind == "kind" else down)(name)


def _place(name: str) -> list[str]:
    return ["--name", name, "--root", str(INSTANCES)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise ClusterError(f"`{' '.join(command)}` ended with {done.returncode}; its messages are above")
