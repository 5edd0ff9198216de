"""Programs that tests drive beside a cluster: helm, Kueue, and Prometheus with its company.

tests/conftest.py takes the fixtures from here and builds, before the first test, what the chosen tests ask
for: a cold build takes longer than a test may.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.devcluster import cluster as provider

TOOL_OF_FIXTURE = {
    "helm": "helm",
    "kueue": "kueue",
    "prometheus": "monitoring",
    "promtool": "monitoring",
    "alertmanager": "monitoring",
    "amtool": "monitoring",
}
"""Which family of `build.py tools --tool` a fixture needs."""


def build_tools_for(fixtures: set[str]) -> None:
    """Build what these fixtures stand for unless it is cached; progress goes to the terminal."""
    for tool in sorted({tool for fixture, tool in TOOL_OF_FIXTURE.items() if fixture in fixtures}):
        provider.build_tool(tool)


def program(name: str) -> Path:
    """Where a built program lies. Raises FileNotFoundError saying how to build it."""
    path = provider.TOOL_BIN / name
    if not path.exists():
        build = f"python deploy/devcluster/build.py tools --tool {TOOL_OF_FIXTURE[name]}"
        raise FileNotFoundError(f"{path} is not built; run: {build}")
    return path


def run_program(command: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float = 300.0) -> str:
    """Standard output of a program that must succeed; what it printed is the error otherwise."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def helm() -> Path:
    """helm, of the version that deploy/tools/helm/go.mod names."""
    return program("helm")


@pytest.fixture(scope="session")
def kueue() -> Path:
    """The controller, of the version that deploy/tools/kueue/go.mod names."""
    return program("kueue")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """The server."""
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Checks and unit tests of rules, checks of expositions, blocks from OpenMetrics."""
    return program("promtool")


@pytest.fixture(scope="session")
def alertmanager() -> Path:
    """The server."""
    return program("alertmanager")


@pytest.fixture(scope="session")
def amtool() -> Path:
    """Checks Alertmanager's configuration and its routes."""
    return program("amtool")
