"""A running job, and the commands that a reader of the runbooks types at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.docs.console import Command, ConsoleError, Shell
from tests.operator.operator_process import write_kubeconfig
from tests.support.commands import Done, zerotrain
from tests.support.devcluster import Cluster
from tests.test_repo_shape import ROOT

EXAMPLE = ROOT / "deploy" / "examples" / "gpt-nvme.yaml"
NEEDS_MORE = ("DCGM_POD", "kubectl debug", "zerotrain doctor --pod", "FOLDER")
"""Words of commands that need more than this cluster has: a GPU, a pulled image, a test of their own, a
mounted checkpoint folder.
"""
REFUSALS = {
    "kubectl top": "Metrics API not available",
    "--previous": "previous terminated container",
    "podmonitor": "doesn't have a resource type",
    "servicemonitor": "doesn't have a resource type",
    "-stacks": "NotFound",
}
"""Part of a command -> its error on a cluster with neither add-on, or for a job that never failed or
stalled.
"""

ROLES = ("viewer", "editor")
LOOKS = (
    "get",
    "get watched",
    "describe watched",
    "logs watched --tail 1",
    "top watched --once",
    "wait watched --for running",
)
CHANGES = (
    "suspend watched --dry-run server",
    "delete watched --dry-run server",
    f"submit {EXAMPLE} --dry-run server",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A running job, and the shell of a user who looks at it."""

    values: dict[str, str]
    """Values of the runbooks' placeholders."""
    shell: Shell

    def answer(self, text: str) -> str:
        """Return the output of a command. Raises ConsoleError where it fails."""
        return self.shell.command(Command(text=text, expected="", place="of a job that runs"))

    def refusal(self, text: str) -> str:
        """Return the error of a command; empty where it succeeds."""
        try:
            self.answer(text)
        except ConsoleError as error:
            return str(error)
        return ""


class Person:
    """A user with one of the chart's roles in a namespace, and no other right."""

    def __init__(self, cluster: Cluster, namespace: str, role: str, folder: Path) -> None:
        self.role = role
        self._namespace = namespace
        account = f"--serviceaccount={namespace}:{role}"
        cluster.kubectl("create", "serviceaccount", role, "-n", namespace)
        cluster.kubectl(
            "create", "rolebinding", role, f"--clusterrole=zerotrain-{role}", account, "-n", namespace
        )
        token = cluster.kubectl("create", "token", role, "-n", namespace).stdout.strip()
        self._kubeconfig = write_kubeconfig(cluster, token, folder / f"{role}.kubeconfig")

    def types(self, command: str) -> Done:
        """Run `zerotrain COMMAND` as this user."""
        return zerotrain(*command.split(), "-n", self._namespace, kubeconfig=self._kubeconfig)


def watched_job() -> dict[str, Any]:
    """Return a job that does not end, and that spills, so that the commands about drives have something to
    show.
    """
    raw: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    raw["metadata"]["name"] = "watched"
    raw["spec"]["model"] = {"preset": "gpt-1m"}
    raw["spec"]["steps"] = 1_000_000
    raw["spec"]["checkpoint"]["volume"]["persistentVolumeClaim"]["claimName"] = "first-checkpoints"
    return raw
