"""docs/dashboards.md, executed as it stands: from an empty node to boards with data and a firing alert.

The operator comes from the chart by the real helm, the job from the quick start's file, the metrics from its
ranks through the API server, and the alert arrives at a real Alertmanager.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.dashboards.boards import BOARDS
from deploy.monitoring import stack
from deploy.monitoring.client import PrometheusClient
from tests.docs.console import Block, Shell, blocks
from tests.docs.test_quickstart import own_kubeconfig, tools
from tests.support.crd import CRD_NAME
from tests.support.devcluster import REPOSITORY, Cluster

pytestmark = [pytest.mark.tools, pytest.mark.timeout(900)]

PAGE = REPOSITORY / "docs" / "dashboards.md"
INSTALL = REPOSITORY / "docs" / "quickstart.md"
VARIABLE = "ZEROTRAIN_MONITORING_FOLDER"

EMPTY_WITHOUT = {
    "a GPU": "GPU DCGM Xid NVLink PCIe Tensor Utilisation Clock Temperature Power allocator",
    "a spill": "Spill spill spills drive",
    "a known peak of its device": "MFU",
    "a failure": "Failures",
    "a rank or job that stands out": "Straggler waiting",
}
"""Reason why a panel of this job may be empty -> words of the titles of such panels."""


@pytest.fixture(scope="module")
def page() -> dict[str, Block]:
    return blocks(PAGE)


@pytest.fixture(scope="module")
def stack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the stack, outside build/monitoring, where a developer's own stack runs under the
    same name.
    """
    return tmp_path_factory.mktemp("monitoring") / "dev"


@pytest.fixture(scope="module")
def shell(
    node_cluster: Cluster,
    helm: Path,
    stack_folder: Path,
    prometheus: Path,
    alertmanager: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shell]:
    """A reader's shell, with the operator installed as the quick start says."""
    assert prometheus.parent == alertmanager.parent, "both are built before the first test"
    folder = tmp_path_factory.mktemp("reader")
    with node_cluster.namespace() as namespace:
        node_cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")
        environ = {
            "KUBECONFIG": str(own_kubeconfig(node_cluster, folder, namespace)),
            "PATH": f"{tools(node_cluster, folder, helm)}:{REPOSITORY / '.venv' / 'bin'}",
            **{f"HELM_{name}_HOME": str(folder / "helm") for name in ("CACHE", "CONFIG", "DATA")},
            "NO_COLOR": "1",
            VARIABLE: str(stack_folder.parent),
        }
        reader = Shell(environ=environ)
        for command in blocks(INSTALL)["install"].commands:
            reader.command(replace(command, expected=""))  # another test looks at what it prints
        yield reader
        stack.stop(stack_folder)
        node_cluster.kubectl("delete", "ztj", "--all", "-n", namespace, "--wait=false", check=False)
        (uninstall,) = (c for c in blocks(INSTALL)["clean"].commands if c.text.startswith("helm uninstall"))
        reader.command(replace(uninstall, expected=""))


@pytest.mark.parametrize("name", ["job", "up", "check", "alert"])
def test_the_page_leads_to_data_and_an_alert(shell: Shell, page: dict[str, Block], name: str) -> None:
    shell.run(page[name])


def test_only_panels_of_what_the_job_lacks_are_empty(shell: Shell) -> None:
    """The page's `check` has just printed which panels have no data."""
    printed = next(text for text in reversed(shell.outputs) if "panels have data" in text)
    empty = {line.split("none: ")[1] for line in printed.splitlines() if "none: " in line}
    titles = {panel.title for board in BOARDS for panel in board.panels()}
    assert empty <= titles
    words = {word for group in EMPTY_WITHOUT.values() for word in group.split()}
    assert [title for title in sorted(empty) if not words & set(re.findall(r"\w+", title))] == []


def test_the_targets_bear_the_labels_that_the_chart_gives(shell: Shell, stack_folder: Path) -> None:
    running = stack.load(stack_folder)
    assert running is not None, shell.outputs[-1]
    found = PrometheusClient(running.prometheus).targets()
    workers = [target["labels"] for target in found if target["labels"]["job"] == "zerotrain-workers"]
    assert {labels["pod"] for labels in workers} == {"watched-1-0", "watched-1-1"}
    assert len({labels["instance"] for labels in workers}) == 2
    assert all(labels["node"] and labels["container"] == "worker" for labels in workers)


def test_the_credentials_are_the_owners_alone(shell: Shell, stack_folder: Path) -> None:
    assert shell.outputs, "the stack was started"
    modes = {
        path.name: path.stat().st_mode & 0o077
        for path in (stack_folder, stack_folder / "token")
        if path.exists()
    }
    assert set(modes.values()) == {0}, modes
    assert "dev" in modes


def test_the_page_ends_what_it_started(shell: Shell, page: dict[str, Block], stack_folder: Path) -> None:
    pids = (stack.load(stack_folder) or pytest.fail("nothing runs")).pids.values()
    shell.run(page["down"])
    assert not any(command_of(pid) for pid in pids)
    assert not (stack_folder / "state.json").exists()


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty once it has ended, even if it has not been reaped."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def test_every_block_of_the_page_is_executed(page: dict[str, Block]) -> None:
    assert set(page) == {"job", "up", "check", "alert", "down"}
