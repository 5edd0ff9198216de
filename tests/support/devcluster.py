"""Clusters for tests: starts instances of the development cluster and sends requests to them.

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
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.devcluster import cluster as provider
from deploy.devcluster.builder.cache import locked
from deploy.devcluster.cluster import HOST_IMAGE, INSTANCES, ROOT
from tests.support import background, kube_get
from tests.support.kube_json import KubeJson

REPOSITORY = ROOT
BIN = provider.BIN
IMAGES = HOST_IMAGE.parent
ClusterError = provider.ClusterError

EXIT_UNSUPPORTED = 3
"""Exit code of `up` when the machine cannot run the profile at all."""


PATIENCE_S = 180.0
"""Timeout of a wait, unless the test sets its own. Only a failure takes that long, even on a busy machine."""


class UnsupportedError(ClusterError):
    """Raised if this machine cannot run the profile; the message contains the reason."""


def run(
    command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end without checking the result."""
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def checked(command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 300.0) -> str:
    """Return the standard output of a command that must succeed."""
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
    """Certificate of the cluster's certificate authority, PEM."""
    token: str
    """Bearer token of the kubeconfig's user; empty if that user has a certificate."""
    name: str = ""
    """Name of the instance; empty for a cluster that the tests did not start."""
    own_namespace: str = "default"
    """Namespace of requests that name none."""

    def kubectl(
        self, *args: str, input: str | None = None, check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; with `check`, a failure raises ClusterError with kubectl's output."""
        command = [*self.kubectl_command, "--kubeconfig", str(self.kubeconfig), *args]
        result = run(command, stdin=input, timeout_s=timeout_s)
        if check and result.returncode != 0:
            raise ClusterError(
                f"kubectl {' '.join(args)}: exit {result.returncode}\n{result.stdout}{result.stderr}"
            )
        return result

    @cached_property
    def api(self) -> KubeJson:
        """Client that sends requests from this process."""
        return KubeJson(self)

    def get(self, *args: str) -> Any:
        """Return what `kubectl get ... -o json` prints, with the managed fields.

        Read from this process, which takes 2 ms of the processor, and a kubectl 140 ms. That is needed where
        the user has a certificate.
        """
        if not self.token:
            return json.loads(self.kubectl("get", *args, "-o", "json").stdout)
        return kube_get.get(self.api, args, namespace=self.own_namespace)

    def apply(self, *objects: dict[str, Any], namespace: str | None = None) -> None:
        """Apply plain objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        where = ("--namespace", namespace) if namespace else ()
        self.kubectl("apply", *where, "-f", "-", input=text)

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """Create a namespace in which pods can be created; delete it afterwards, without waiting."""
        name = f"test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        try:
            # The API server rejects pods until the controllers have created the namespace's default account.
            wait_until(
                lambda: self.get("serviceaccounts", "-n", name)["items"],
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
    context = view["contexts"][0]["context"]
    return Cluster(
        kubeconfig=kubeconfig,
        kubectl_command=kubectl_command,
        api_url=server["server"],
        ca=base64.b64decode(server.get("certificate-authority-data", "")),
        token=user.get("token", ""),
        name=name,
        own_namespace=context.get("namespace", "default"),
    )


def existing() -> Cluster | None:
    """Return the cluster of ZEROTRAIN_TEST_KUBECONFIG, or None if the variable is not set."""
    found = provider.existing()
    return None if found is None else open_kubeconfig(found.kubeconfig, found.kubectl)


def build_tools(profile: str) -> None:
    """Build the profile's programs unless they are cached; progress goes to the terminal."""
    provider.build(profile, image=False)


class Devcluster:
    """The supervisor's verbs for instances under one root."""

    def __init__(self, *, root: Path = INSTANCES, program: Path = BIN / "devcluster") -> None:
        self.root = root
        self.program = program

    def command(self, verb: str, *args: str, name: str | None = None) -> list[str]:
        place = ["--root", str(self.root)] + (["--name", name] if name else [])
        return [str(self.program), verb, *place, *args]

    def up(self, profile: str, name: str, *args: str, timeout_s: float = 600.0) -> Cluster:
        """Start an instance. It ends with this process, even when the process is killed."""
        owner = ["--owner-pid", str(os.getpid())]
        # Instances choose free ports at random and bind them seconds later. All ports of a node but one are
        # in its own network, and a node takes long to start.
        start_lock = (
            nullcontext() if profile == "node" else locked(INSTANCES.parent / ".up.lock", lambda: None)
        )
        with start_lock:
            checked(
                self.command("up", "--profile", profile, "--bin-dir", str(BIN), *owner, *args, name=name),
                timeout_s=timeout_s,
            )
        kubectl = (str(self.program), "kubectl")
        return open_kubeconfig(self.root / name / "kubeconfig", kubectl, name=name)

    def down(self, name: str) -> str:
        return checked(self.command("down", name=name))

    def status(self, name: str) -> dict[str, Any]:
        """Return settings and components of one instance."""
        found: dict[str, Any] = json.loads(checked(self.command("status", "--json", name=name)))
        return found

    @contextmanager
    def lease(self, profile: str, *args: str) -> Iterator[Cluster]:
        """Run a separate instance for the length of the block."""
        name = f"test-{secrets.token_hex(4)}"
        try:
            yield self.up(profile, name, *args)
        finally:
            self.down(name)


class Pool:
    """Clusters that the tests of one process share: each starts at its first use."""

    def __init__(self, clusters: Devcluster) -> None:
        self._clusters = clusters
        self._running: dict[tuple[str, ...], Cluster] = {}
        self._leases = ExitStack()

    def get(self, profile: str, *args: str) -> Cluster:
        """Return the cluster of this profile and these arguments of `up`."""
        key = (profile, *args)
        if key not in self._running:
            self._running[key] = self._leases.enter_context(self._clusters.lease(profile, *args))
        return self._running[key]

    def close(self) -> None:
        """End all clusters: an idle control plane takes a tenth of a core. A later `get` starts a new one."""
        self._running.clear()
        self._leases.close()


def wait_until(condition: Any, what: str, *, timeout_s: float = PATIENCE_S, every_s: float = 0.1) -> Any:
    """Poll the condition until it is true and return its value; the error names the awaited condition.

    Raises ThreadDied at once if an exception has ended a thread of the test.
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
