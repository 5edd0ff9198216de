"""The table of Go modules, with their programs and the cluster profile or tool that needs each.

Each family of programs has its own module, because their dependency versions conflict: CoreDNS and containerd
each raise grpc, etcd and OpenTelemetry to versions of their own.
"""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Profile(Enum):
    """Sets of programs that a development cluster can consist of."""

    CONTROL_PLANE = "control-plane"
    NODE = "node"
    SIMULATED = "simulated"


class Tool(Enum):
    """Programs that are part of no cluster and are built only on request: installers and monitoring."""

    HELM = "helm"
    KUEUE = "kueue"
    MONITORING = "monitoring"


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One Go module of this folder and the way `go build` turns it into programs."""

    name: str
    folder: str
    """Folder, relative to deploy/devcluster."""
    package: str
    """Package to build: `.` for a main package of the project, `tool` for the tool directives of go.mod."""
    programs: tuple[str, ...]
    summary: str
    tags: tuple[str, ...] = ()
    cgo: bool = True
    """False if the program must be static, because it runs in an image that holds nothing else."""
    wants_seccomp: bool = False
    """Whether to add the `seccomp` tag if the headers of libseccomp are installed."""
    stamp_kubernetes_version: bool = False
    stamp_versions: tuple[tuple[str, str], ...] = ()
    """Pairs of a linker variable and the module whose version in go.mod it receives."""


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
    tags=("no_btrfs", "no_devmapper", "no_zfs"),  # snapshotters that are never used, and their C headers
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

HELM = Module(
    name="helm",
    folder="../tools/helm",
    package="tool",
    programs=("helm",),
    summary="package manager (helm)",
    cgo=False,
    stamp_versions=(("helm.sh/helm/v4/internal/version.version", "helm.sh/helm/v4"),),
)
KUEUE = Module(
    name="kueue",
    folder="../tools/kueue",
    package="tool",
    programs=("kueue",),
    summary="job queueing (Kueue)",
    cgo=False,
    stamp_versions=(("sigs.k8s.io/kueue/pkg/version.GitVersion", "sigs.k8s.io/kueue"),),
)
PROMETHEUS = Module(
    name="prometheus",
    folder="../tools/monitoring",
    package="tool",
    programs=("prometheus", "promtool"),
    summary="Prometheus and promtool",
    tags=("remove_all_sd", "enable_kubernetes_sd"),  # of all ways to find targets: files, lists, Kubernetes
    cgo=False,
    stamp_versions=(("github.com/prometheus/common/version.Version", "github.com/prometheus/prometheus"),),
)
# A separate module: Prometheus requires a newer Alertmanager than any whose module holds its embedded pages.
ALERTMANAGER = Module(
    name="alertmanager",
    folder="../tools/alertmanager",
    package="tool",
    programs=("alertmanager", "amtool"),
    summary="Alertmanager and amtool",
    cgo=False,
    stamp_versions=(("github.com/prometheus/common/version.Version", "github.com/prometheus/alertmanager"),),
)

MODULES_OF_TOOL: dict[Tool, tuple[Module, ...]] = {
    Tool.HELM: (HELM,),
    Tool.KUEUE: (KUEUE,),
    Tool.MONITORING: (PROMETHEUS, ALERTMANAGER),
}

_GO_DIRECTIVE = re.compile(r"^go (\d+\.\d+(?:\.\d+)?)", re.MULTILINE)
_KUBERNETES = re.compile(r"\bk8s\.io/kubernetes v(\d+)\.(\d+)\.(\S+)")


def required_go(folder: Path) -> tuple[int, ...]:
    """Return the `go` directive of a module's go.mod as numbers, comparable with a toolchain's version."""
    found = _GO_DIRECTIVE.search((folder / "go.mod").read_text())
    if found is None:
        raise ValueError(f"{folder / 'go.mod'} has no `go` directive; `go mod tidy` in that folder adds it")
    return tuple(int(part) for part in found[1].split("."))


def version_ldflags(folder: Path, stamps: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return linker flags that make programs report the version of the module that they are built from."""
    text = (folder / "go.mod").read_text()
    flags = []
    for variable, module in stamps:
        found = re.search(rf"^(?:require |\t){re.escape(module)} (v\S+)", text, re.MULTILINE)
        if found is None:
            raise ValueError(
                f"{folder / 'go.mod'} does not require {module}; its version is stamped into programs"
            )
        flags.append(f"-X {variable}={found[1]}")
    return tuple(flags)


def kubernetes_ldflags(folder: Path) -> tuple[str, ...]:
    """Return linker flags that make `kubectl version` and nodes report the version that go.mod requires."""
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
