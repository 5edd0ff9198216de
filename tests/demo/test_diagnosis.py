"""The demonstration shows the logs of the job's own pods where it fails."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from deploy.demo.__main__ import _diagnose
from deploy.demo.kubectl import Kubectl
from deploy.devcluster.cluster import Cluster
from tests.support.jobs import make_job
from zerotrain.operator.resources import ResourceOptions, worker_pod

pytestmark = pytest.mark.unit


def test_the_selector_of_the_logs_finds_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    cluster = cast(Cluster, SimpleNamespace(kubectl=("kubectl",), kubeconfig="none"))
    _diagnose(Console(quiet=True), Kubectl(cluster, "demo"))
    (selector,) = [command[command.index("--selector") + 1] for command in asked if "--selector" in command]
    labels: dict[str, Any] = worker_pod(make_job(), 1, 0, ResourceOptions())["metadata"]["labels"]
    name, _, value = selector.partition("=")
    assert name in labels
    assert value in ("", labels[name])
