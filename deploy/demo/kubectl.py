"""The kubectl calls of the demonstration, as a user would type them, with JSON results."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deploy.devcluster.cluster import Cluster


class KubectlError(RuntimeError):
    """kubectl failed; the message is that of kubectl."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl for one cluster and namespace."""

    cluster: Cluster
    namespace: str

    def command(self, *args: str) -> list[str]:
        return [*self.cluster.kubectl, "--namespace", self.namespace, *args]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}

    def run(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl and return its standard output. Raises KubectlError with kubectl's message."""
        done = subprocess.run(
            self.command(*args), env=self.environ(), input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def get(self, *args: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("get", *args, "-o", "json"))
        return found


def wait_for(what: str, check: Callable[[], bool], *, seconds: float, every: float = 1.0) -> None:
    """Poll until `check` holds. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up after {seconds:.0f} s: {what}")
        time.sleep(every)
