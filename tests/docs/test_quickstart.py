"""docs/quickstart.md, executed as it stands on a node that knows nothing of the product; then small examples.

A reader's shell: a KUBECONFIG with a namespace of its own, kubectl, helm and zerotrain on the PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.console import Block, Shell, blocks
from tests.support.crd import CRD_NAME
from tests.support.devcluster import REPOSITORY, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(900)]

PAGE = REPOSITORY / "docs" / "quickstart.md"
EXAMPLES = REPOSITORY / "deploy" / "examples"
ON_REQUEST = pytest.mark.skipif(
    os.environ.get("ZEROTRAIN_TEST_EXAMPLES") != "all",
    reason="THESE EXAMPLES ARE NOT RUN HERE: minutes on two cores; set ZEROTRAIN_TEST_EXAMPLES=all",
)
RUN_TOGETHER = (
    pytest.param(("own-script",), id="own-script"),
    pytest.param(
        ("deepspeed-config", "model-factory"), id="deepspeed-config+model-factory", marks=ON_REQUEST
    ),
    pytest.param(("pod-template", "nightly"), id="pod-template+nightly", marks=ON_REQUEST),
)
"""Each group starts at once: most of their time is that of imports and of the kubelet."""


@pytest.fixture(scope="module")
def page() -> dict[str, Block]:
    return blocks(PAGE)


@pytest.fixture(scope="module")
def shell(node_cluster: Cluster, helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("reader")
    with node_cluster.namespace() as namespace:
        # Another module's installation would not be the reader's empty cluster.
        node_cluster.kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")
        environ = {
            "KUBECONFIG": str(own_kubeconfig(node_cluster, folder, namespace)),
            "PATH": f"{tools(node_cluster, folder, helm)}:{REPOSITORY / '.venv' / 'bin'}",
            "HELM_CACHE_HOME": str(folder / "helm"),
            "HELM_CONFIG_HOME": str(folder / "helm"),
            "HELM_DATA_HOME": str(folder / "helm"),
            "NO_COLOR": "1",
        }
        yield Shell(environ=environ)
        node_cluster.kubectl("delete", "ztj", "--all", "-n", namespace, "--wait=false", check=False)
        node_cluster.kubectl("delete", "namespace", "zerotrain-system", "--ignore-not-found", "--wait=false")


def own_kubeconfig(cluster: Cluster, folder: Path, namespace: str) -> Path:
    path = folder / "kubeconfig"
    shutil.copy(cluster.kubeconfig, path)
    context = ("config", "--kubeconfig", str(path), "set-context", "--current", "--namespace", namespace)
    cluster.kubectl(*context)
    return path


def tools(cluster: Cluster, folder: Path, helm: Path) -> Path:
    """A folder with what the page asks for, and with the development cluster's own kubectl."""
    found = folder / "bin"
    found.mkdir()
    (found / "helm").symlink_to(helm)
    kubectl = found / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {" ".join(cluster.kubectl_command)} "$@"\n')
    kubectl.chmod(0o755)
    return found


@pytest.mark.parametrize("name", ["install", "job", "look", "break"])
def test_the_page_up_to_the_recovered_job(shell: Shell, page: dict[str, Block], name: str) -> None:
    shell.run(page[name])


@pytest.mark.parametrize("names", RUN_TOGETHER)
def test_small_examples_run_to_their_end(node_cluster: Cluster, shell: Shell, names: tuple[str, ...]) -> None:
    """Needs the operator that the page installed."""
    kubeconfig = Path(shell.environ["KUBECONFIG"])
    reader = Cluster(
        kubeconfig=kubeconfig,
        kubectl_command=node_cluster.kubectl_command,
        api_url=node_cluster.api_url,
        ca=node_cluster.ca,
        token=node_cluster.token,
    )
    # Where the page failed, its second job would take these jobs' time; the page itself deletes the first.
    reader.kubectl("delete", "ztj", "second", "--ignore-not-found", "--wait=false")
    files = [part for name in names for part in ("-f", str(EXAMPLES / f"{name}.yaml"))]
    reader.kubectl("apply", *files)

    def ended() -> bool:
        jobs = reader.get(*files)["items"]
        phases = [item.get("status", {}).get("phase") for item in jobs if item["kind"] == "ZeroTrainingJob"]
        assert not {"Failed", "Stalled"} & set(phases), reader.kubectl("describe", "ztj").stdout
        return set(phases) == {"Completed"}

    wait_until(ended, f"{', '.join(names)} to complete", timeout_s=480, every_s=0.5)
    if "nightly" in names:
        wait_until(
            lambda: (
                reader.get("ztj", "nightly")["status"]["checkpoint"].get("verification", {}).get("state")
                == "Verified"
            ),
            "the verification of nightly's checkpoint",
        )
    reader.kubectl("delete", *files, "--wait=false")


def test_the_page_cleans_up(shell: Shell, page: dict[str, Block]) -> None:
    shell.run(page["clean"])


def test_the_page_without_a_cluster(shell: Shell, page: dict[str, Block]) -> None:
    shutil.rmtree(REPOSITORY / "build" / "quickstart", ignore_errors=True)
    shell.run(page["local"])


def test_every_block_of_the_page_is_executed(page: dict[str, Block]) -> None:
    assert set(page) == {"install", "job", "look", "break", "clean", "local"}
