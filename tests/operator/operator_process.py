"""The real operator as a process of its own, with the rights of its ServiceAccount and nothing more."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.operator.call_record import FILE_VARIABLE, REFUSALS_VARIABLE
from tests.support.crd import CRD_NAME, wait_established
from tests.support.devcluster import PATIENCE_S, REPOSITORY, Cluster, wait_until
from tests.support.ports import free_port

KEY = b"0123456789abcdef0123456789abcdef"
NAMESPACE = "zerotrain-system"


def install(cluster: Cluster, folder: Path) -> Path:
    """Apply the shipped manifests without their Deployment; return a kubeconfig with the operator's own
    token.
    """
    manifests = REPOSITORY / "deploy" / "kustomize"
    cluster.kubectl("apply", "-k", str(manifests))
    cluster.kubectl("delete", "deployment", "zerotrain-operator", "-n", NAMESPACE)
    wait_established(cluster, CRD_NAME)
    token = cluster.kubectl("create", "token", "zerotrain-operator", "-n", NAMESPACE, "--duration=2h").stdout
    return write_kubeconfig(cluster, token.strip(), folder / "operator.kubeconfig")


def write_kubeconfig(cluster: Cluster, token: str, path: Path) -> Path:
    ca = path.with_suffix(".ca")
    ca.write_bytes(cluster.ca)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "operator",
        "contexts": [{"name": "operator", "context": {"cluster": "c", "user": "operator"}}],
        "clusters": [{"name": "c", "cluster": {"server": cluster.api_url, "certificate-authority": str(ca)}}],
        "users": [{"name": "operator", "user": {"token": token}}],
    }
    path.write_text(json.dumps(config))
    return path


class OperatorProcess:
    """One replica. Its identity stays the same over restarts, as a pod's UID does over its containers'."""

    def __init__(self, kubeconfig: Path, folder: Path, env: Mapping[str, str] | None = None) -> None:
        key = folder / "channel.key"
        key.write_bytes(KEY)
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / "operator.log"
        self._refusals = folder / "operator.refusals"
        self._env = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "ZEROTRAIN_OPERATOR_IDENTITY": "operator-under-test",
            "ZEROTRAIN_OPERATOR_NAMESPACE": NAMESPACE,
            "ZEROTRAIN_OPERATOR_KEY_FILE": str(key),
            "ZEROTRAIN_OPERATOR_HTTP_ADDRESS": self.address,
            "ZEROTRAIN_OPERATOR_CHANNEL": "direct",
            "MALLOC_MMAP_THRESHOLD_": "131072",  # as in deploy/kustomize/deployment.yaml
            REFUSALS_VARIABLE: str(self._refusals),
            **(env or {}),
        }
        self.expects_refusals = False
        """Whether refusals are expected: an API server that starts anew rejects all requests until it has
        read the roles.
        """
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        # In a session of tests it is the same operator, with a record of its requests to the API server.
        module = "tests.operator.recorded_operator" if FILE_VARIABLE in os.environ else "zerotrain.operator"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )
        if wait:
            self.wait_until_leading()

    def wait_until_leading(self, *, timeout_s: float = PATIENCE_S) -> None:
        try:
            wait_until(self.leads, "the operator to lead", timeout_s=timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.tail()}") from None

    @property
    def pid(self) -> int:
        """Process id; 0 when no process runs."""
        return self._process.pid if self._process is not None else 0

    @property
    def runs(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def leads(self) -> bool:
        """Whether the operator is the leader. Raises AssertionError when the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"the operator ended:\n{self.tail()}")
        return "zerotrain_operator_leader 1.0" in self.get("/metrics")

    def kill(self) -> None:
        """Send SIGKILL: no clean-up, no lease given back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """Send SIGTERM and return the exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout=PATIENCE_S)
        self._process = None
        return code

    def get(self, path: str) -> str:
        """Return the text of one of its own HTTP paths; empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=60) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException):
            return ""

    def check_permissions(self) -> None:
        """Check that the shipped role suffices for all that was done.

        A quota or a namespace that ends answers with the same code and another message.
        """
        if self.expects_refusals:
            return
        refused = self.refusals()
        assert not refused, f"the API server refused: {refused}"

    def refusals(self) -> list[str]:
        """Return `VERB path: message` for each request that the roles did not allow, where requests are
        recorded.
        """
        lines = self._refusals.read_text().splitlines() if self._refusals.exists() else []
        return [line for line in lines if " cannot " in line and " resource " in line]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])


@contextmanager
def operator(
    kubeconfig: Path, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[OperatorProcess]:
    """Run a leading operator for the length of the block, and end it with SIGTERM, so that the lease is
    free.
    """
    process = OperatorProcess(kubeconfig, folder, env)
    try:
        process.start()
    except BaseException:
        process.kill()
        raise
    try:
        yield process
    finally:
        try:
            process.check_permissions()
            process.terminate()
        finally:
            process.kill()
