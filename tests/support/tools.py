"""Programs that tests drive beside a cluster: helm, Kueue, and Prometheus with its company.

tests/conftest.py takes the fixtures from here; `built` is its fixture and waits for a program's build.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deploy.devcluster import cluster as provider


def program(name: str) -> Path:
    """Where a built program lies."""
    return provider.TOOL_BIN / name


def run_program(command: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float = 300.0) -> str:
    """Standard output of a program that must succeed; what it printed is the error otherwise."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def helm(built: Callable[[str], None]) -> Path:
    """helm, of the version that deploy/tools/helm/go.mod names."""
    built("helm")
    return program("helm")


@pytest.fixture(scope="session")
def kueue(built: Callable[[str], None]) -> Path:
    """The controller, of the version that deploy/tools/kueue/go.mod names."""
    built("kueue")
    return program("kueue")


@pytest.fixture(scope="session")
def prometheus(built: Callable[[str], None]) -> Path:
    """The server."""
    built("prometheus")
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool(built: Callable[[str], None]) -> Path:
    """Checks and unit tests of rules, checks of expositions, blocks from OpenMetrics."""
    built("promtool")
    return program("promtool")


@pytest.fixture(scope="session")
def alertmanager(built: Callable[[str], None]) -> Path:
    """The server."""
    built("alertmanager")
    return program("alertmanager")


@pytest.fixture(scope="session")
def amtool(built: Callable[[str], None]) -> Path:
    """Checks Alertmanager's configuration and its routes."""
    built("amtool")
    return program("amtool")
