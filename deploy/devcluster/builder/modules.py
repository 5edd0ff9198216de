"""The table of Go modules: which programs each one gives, and which profile of the cluster needs it.

One module per family of programs, because their dependency versions fight (CoreDNS and containerd each lift
grpc, etcd and OpenTelemetry to versions of their own).
"""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Profile(Enum):
    """What a development cluster consists of."""

    CONTROL_PLANE = "control-plane"
    NODE = "node"
    SIMULATED = "simulated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One Go module of this folder and how `go build` turns it into programs."""

    name: str
    folder: str
    """Relative to deploy/devcluster."""
    package: str
    """`.` for a main package of ours, `tool` for the tool directives of go.mod."""
    programs: tuple[str, ...]
    summary: str
    tags: tuple[str, ...] = ()
    cgo: bool = True
    """False where the program must be static: it runs in an image that holds nothing else."""
    wants_seccomp: bool = False
    """Adds the `seccomp` tag where the headers of libseccomp are installed."""
    stamp_kubernetes_version: bool = False


CONTROL_PLANE = Module(
    name="devcluster",
    folder=".",
    package=".",
    programs=("devcluster",),
    summary="Kubernetes itself (API server, etcd, scheduler, controllers, kubelet, kubectl)",
    stamp_kubernetes_version=True,
)
NODE = Module(
    name="node",
    folder="node",
    package="tool",
    programs=(
        "containerd",
        "containerd-shim-runc-v2",
        "ctr",
        "runc",
        "bridge",
        "loopback",
        "host-local",
        "portmap",
    ),
    summary="container runtime (containerd, runc, network plugins)",
    tags=("no_btrfs", "no_devmapper", "no_zfs"),  # snapshotters that we never use, and their C headers
    wants_seccomp=True,
)
COREDNS = Module(
    name="coredns", folder="coredns", package=".", programs=("coredns",), summary="cluster DNS (CoreDNS)"
)
PAUSE = Module(
    name="pause", folder="pause", package=".", programs=("pause",), summary="pod sandbox program", cgo=False
)
KWOK = Module(
    name="kwok", folder="kwok", package="tool", programs=("kwok",), summary="simulated nodes (kwok)"
)

MODULES_OF: dict[Profile, tuple[Module, ...]] = {
    Profile.CONTROL_PLANE: (CONTROL_PLANE,),
    Profile.NODE: (CONTROL_PLANE, NODE, COREDNS, PAUSE),
    Profile.SIMULATED: (CONTROL_PLANE, KWOK),
}

_GO_DIRECTIVE = re.compile(r"^go (\d+\.\d+(?:\.\d+)?)", re.MULTILINE)
_KUBERNETES = re.compile(r"\bk8s\.io/kubernetes v(\d+)\.(\d+)\.(\S+)")


def required_go(folder: Path) -> tuple[int, ...]:
    """The `go` directive of a module's go.mod as numbers, for comparing with a toolchain's version."""
    found = _GO_DIRECTIVE.search((folder / "go.mod").read_text())
    if found is None:
        raise ValueError(f"{folder / 'go.mod'} has no `go` directive; `go mod tidy` in that folder adds it")
    return tuple(int(part) for part in found[1].split("."))


def kubernetes_ldflags(folder: Path) -> tuple[str, ...]:
    """Linker flags that make `kubectl version` and the nodes report the version that go.mod requires."""
    found = _KUBERNETES.search((folder / "go.mod").read_text())
    if found is None:
        raise ValueError(
            f"{folder / 'go.mod'} does not require k8s.io/kubernetes; the version stamp comes from there"
        )
    major, minor, patch = found.groups()
    package = "k8s.io/component-base/version"
    return (
        f"-X {package}.gitVersion=v{major}.{minor}.{patch}",
        f"-X {package}.gitMajor={major}",
        f"-X {package}.gitMinor={minor}",
    )
