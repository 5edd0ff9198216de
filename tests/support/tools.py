"""Programs that tests run beside a cluster: helm, Kueue, Prometheus and its tools.

tests/conftest.py imports the fixtures from here; its fixture `built` waits for a program's build.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deploy.devcluster import cluster as provider


def program(name: str) -> Path:
    """Return the path of a built program."""
    return provider.TOOL_BIN / name


def run_program(command: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float = 300.0) -> str:
    """Return the standard output of a program that must succeed; the error contains its output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def helm(built: Callable[[str], None]) -> Path:
    """Return helm, of the version that deploy/tools/helm/go.mod names."""
    built("helm")
    return program("helm")


@pytest.fixture(scope="session")
def kueue(built: Callable[[str], None]) -> Path:
    """Return Kueue's controller, of the version that deploy/tools/kueue/go.mod names."""
    built("kueue")
    return program("kueue")


@pytest.fixture(scope="session")
def prometheus(built: Callable[[str], None]) -> Path:
    """Return the Prometheus server."""
    built("prometheus")
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool(built: Callable[[str], None]) -> Path:
    """Return promtool: checks and unit tests of rules, checks of expositions, blocks from OpenMetrics."""
    built("promtool")
    return program("promtool")


@pytest.fixture(scope="session")
def alertmanager(built: Callable[[str], None]) -> Path:
    """Return the Alertmanager server."""
    built("alertmanager")
    return program("alertmanager")


@pytest.fixture(scope="session")
def amtool(built: Callable[[str], None]) -> Path:
    """Return amtool, which checks Alertmanager's configuration and its routes."""
    built("amtool")
    return program("amtool")
