"""Clusters for tests: starts instances of the development cluster and speaks to them.

tests/conftest.py turns these into fixtures; tests of the cluster itself call `Devcluster` directly.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.devcluster import cluster as provider
from deploy.devcluster.builder.cache import locked
from deploy.devcluster.cluster import HOST_IMAGE, INSTANCES, ROOT
from tests.support import background

REPOSITORY = ROOT
BIN = provider.BIN
IMAGES = HOST_IMAGE.parent
ClusterError = provider.ClusterError

EXIT_UNSUPPORTED = 3
"""`up` ends with this when the machine cannot run the profile at all."""


PATIENCE_S = 180.0
"""Of a wait, unless the test says otherwise. Only a failure takes that long, however busy the machine."""


class UnsupportedError(ClusterError):
    """This machine cannot run the profile; the message says why."""


def run(
    command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run to the end without judging the result."""
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def checked(command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 300.0) -> str:
    """Standard output of a command that must succeed."""
    result = run(command, stdin=stdin, timeout_s=timeout_s)
    if result.returncode == EXIT_UNSUPPORTED:
        raise UnsupportedError(result.stderr.strip())
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster and full rights on it."""

    kubeconfig: Path
    kubectl_command: tuple[str, ...]
    api_url: str
    ca: bytes
    """The authority's certificate, PEM."""
    token: str
    """Bearer token of the kubeconfig's user; empty if that user shows a certificate."""
    name: str = ""
    """Name of the instance; empty for a cluster that is not ours."""

    def kubectl(
        self, *args: str, input: str | None = None, check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; with `check`, a failure raises ClusterError with what kubectl printed."""
        command = [*self.kubectl_command, "--kubeconfig", str(self.kubeconfig), *args]
        result = run(command, stdin=input, timeout_s=timeout_s)
        if check and result.returncode != 0:
            raise ClusterError(
                f"kubectl {' '.join(args)}: exit {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result

    def get(self, *args: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *args, "-o", "json").stdout)

    def apply(self, *objects: dict[str, Any], namespace: str | None = None) -> None:
        """Apply plain objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        where = ("--namespace", namespace) if namespace else ()
        self.kubectl("apply", *where, "-f", "-", input=text)

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A fresh namespace in which pods can be created; deleted afterwards, without waiting."""
        name = f"test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        try:
            # Pods are refused until the controllers have made the namespace's default account.
            wait_until(
                lambda: (
                    self.kubectl("get", "serviceaccount", "default", "-n", name, check=False).returncode == 0
                ),
                f"the default service account of namespace {name}",
            )
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", check=False)


def open_kubeconfig(kubeconfig: Path, kubectl_command: tuple[str, ...], *, name: str = "") -> Cluster:
    """Read server, authority and token of the kubeconfig's current context."""
    show = ("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    view = json.loads(checked([*kubectl_command, "--kubeconfig", str(kubeconfig), *show]))
    server, user = view["clusters"][0]["cluster"], view["users"][0]["user"]
    return Cluster(
        kubeconfig=kubeconfig,
        kubectl_command=kubectl_command,
        api_url=server["server"],
        ca=base64.b64decode(server.get("certificate-authority-data", "")),
        token=user.get("token", ""),
        name=name,
    )


def existing() -> Cluster | None:
    """The cluster of ZEROTRAIN_TEST_KUBECONFIG, if that is set."""
    found = provider.existing()
    return None if found is None else open_kubeconfig(found.kubeconfig, found.kubectl)


def build_tools(profile: str) -> None:
    """Build the profile's programs unless they are cached; progress goes to the terminal."""
    provider.build(profile, image=False)


class Devcluster:
    """Runs the supervisor's verbs for instances under one root."""

    def __init__(self, *, root: Path = INSTANCES, program: Path = BIN / "devcluster") -> None:
        self.root = root
        self.program = program

    def command(self, verb: str, *args: str, name: str | None = None) -> list[str]:
        place = ["--root", str(self.root)] + (["--name", name] if name else [])
        return [str(self.program), verb, *place, *args]

    def up(self, profile: str, name: str, *args: str, timeout_s: float = 600.0) -> Cluster:
        """Start an instance. It ends with this process even if that is killed."""
        owner = ["--owner-pid", str(os.getpid())]
        # Instances choose free ports at random and bind them seconds later. A node's are in a network of its
        # own, all but one, and it takes long.
        turn = nullcontext() if profile == "node" else locked(INSTANCES.parent / ".up.lock", lambda: None)
        with turn:
            checked(
                self.command("up", "--profile", profile, "--bin-dir", str(BIN), *owner, *args, name=name),
                timeout_s=timeout_s,
            )
        kubectl = (str(self.program), "kubectl")
        return open_kubeconfig(self.root / name / "kubeconfig", kubectl, name=name)

    def down(self, name: str) -> str:
        return checked(self.command("down", name=name))

    def status(self, name: str) -> dict[str, Any]:
        """Settings and components of one instance."""
        found: dict[str, Any] = json.loads(checked(self.command("status", "--json", name=name)))
        return found

    @contextmanager
    def lease(self, profile: str, *args: str) -> Iterator[Cluster]:
        """An instance of its own for the length of the block."""
        name = f"test-{secrets.token_hex(4)}"
        try:
            yield self.up(profile, name, *args)
        finally:
            self.down(name)


class Pool:
    """Clusters that all tests of one process use in turn: each starts when it is first asked for."""

    def __init__(self, clusters: Devcluster) -> None:
        self._clusters = clusters
        self._running: dict[tuple[str, ...], Cluster] = {}
        self._leases = ExitStack()

    def get(self, profile: str, *args: str) -> Cluster:
        """The cluster of this profile and these arguments of `up`."""
        key = (profile, *args)
        if key not in self._running:
            self._running[key] = self._leases.enter_context(self._clusters.lease(profile, *args))
        return self._running[key]

    def close(self) -> None:
        """End them all: an idle control plane takes a tenth of a core. Whoever asks again gets a new one."""
        self._running.clear()
        self._leases.close()


def wait_until(condition: Any, what: str, *, timeout_s: float = PATIENCE_S, every_s: float = 0.1) -> Any:
    """Ask until the answer is true and return it; the error names what was awaited.

    Raises ThreadDied at once where an exception has ended a thread of the test.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        background.check(what)
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}; the last answer was {answer!r}")
        time.sleep(every_s)
