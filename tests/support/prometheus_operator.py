"""The custom resources of the Prometheus operator, as its Go module carries them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.devcluster.builder.paths import find_paths
from deploy.devcluster.builder.progress import Reporter
from deploy.devcluster.builder.toolchain import find_or_install
from tests.support.crd import wait_established
from tests.support.devcluster import REPOSITORY, Cluster

MODULE = "github.com/prometheus-operator/prometheus-operator"
VERSION = "v0.93.1"
SUM = "h1:4Juk8v93RdG1DSGD/mGp+SeQKPmnlLIj2iq3blLZgFY="
"""Of the module's files, as go.sum would name it: another content is refused."""


def install_crds(cluster: Cluster, plurals: Sequence[str]) -> None:
    """Make the cluster serve these kinds of monitoring.coreos.com/v1."""
    folder = _module() / "example" / "prometheus-operator-crd"
    for plural in plurals:
        path = folder / f"monitoring.coreos.com_{plural}.yaml"
        cluster.kubectl("apply", "--server-side", "-f", str(path))
    for plural in plurals:
        wait_established(cluster, f"{plural}.monitoring.coreos.com")


def _module() -> Path:
    """Its folder in Go's module cache; downloaded (5 MB) the first time."""
    paths = find_paths(REPOSITORY, os.environ)
    toolchain = find_or_install((1, 26), paths, Reporter())
    done = subprocess.run(
        [toolchain.go, "mod", "download", "-json", f"{MODULE}@{VERSION}"],
        env=dict(toolchain.environ),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{MODULE}@{VERSION} cannot be had: {done.stdout}{done.stderr}")
    answer = json.loads(done.stdout)
    if answer["Sum"] != SUM:
        raise RuntimeError(f"{MODULE}@{VERSION} has the sum {answer['Sum']}; expected {SUM}")
    return Path(answer["Dir"])
