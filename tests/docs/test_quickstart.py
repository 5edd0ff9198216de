"""docs/quickstart.md, executed as it stands on a node without the product.

Then the runbooks' commands, the report and the doctor on a job that runs; then small examples.

A reader's shell: a KUBECONFIG with a namespace of its own, kubectl, helm and zerotrain on the PATH.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.cli.test_report_command import TITLES, Page, check_self_contained
from tests.docs.console import Block, Shell, blocks
from tests.docs.runbooks import commands
from tests.docs.watched import CHANGES, LOOKS, NEEDS_MORE, REFUSALS, ROLES, Person, Watched, watched_job
from tests.support.browser import find_browser, paper
from tests.support.crd import CRD_NAME
from tests.support.devcluster import REPOSITORY, Cluster, open_kubeconfig, wait_until
from tests.support.on_request import ON_REQUEST
from tests.support.tiers import with_slow_rows
from zerotrain.cli.doctor.finding import State, from_records
from zerotrain.client.command_exits import CommandExit

pytestmark = [pytest.mark.tools, pytest.mark.timeout(900)]

PAGE = REPOSITORY / "docs" / "quickstart.md"
EXAMPLES = REPOSITORY / "deploy" / "examples"
RUN_TOGETHER = (
    pytest.param(("own-script",), id="own-script"),
    pytest.param(
        ("deepspeed-config", "model-factory"), id="deepspeed-config+model-factory", marks=ON_REQUEST
    ),
    pytest.param(("pod-template", "nightly"), id="pod-template+nightly", marks=ON_REQUEST),
)
"""Groups of examples that start at once: most of their time is that of imports and of the kubelet."""


@pytest.fixture(scope="module")
def page() -> dict[str, Block]:
    return blocks(PAGE)


@pytest.fixture(scope="module")
def shell(node_cluster: Cluster, helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("reader")
    with node_cluster.namespace() as namespace:
        # With another module's installation the cluster would not be the reader's empty one.
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
    """Make a folder with the programs that the page needs, and with the development cluster's own kubectl."""
    found = folder / "bin"
    found.mkdir()
    (found / "helm").symlink_to(helm)
    kubectl = found / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {" ".join(cluster.kubectl_command)} "$@"\n')
    kubectl.chmod(0o755)
    return found


@pytest.fixture(scope="module")
def reader(node_cluster: Cluster, shell: Shell) -> Cluster:
    """The cluster as `shell` sees it: in the reader's namespace."""
    return open_kubeconfig(Path(shell.environ["KUBECONFIG"]), node_cluster.kubectl_command)


@pytest.mark.parametrize("name", ["install", "job", "look", "break"])
def test_the_page_up_to_the_recovered_job(shell: Shell, page: dict[str, Block], name: str) -> None:
    shell.run(page[name])


class TestOfAJobThatRuns:
    """Tests of a job that runs; they need the operator and the claim that the page made."""

    @pytest.fixture(scope="class")
    @classmethod
    def watched(
        cls, reader: Cluster, shell: Shell, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Watched]:
        folder = tmp_path_factory.mktemp("watched")
        reader.kubectl("delete", "ztj", "second", "--ignore-not-found", "--wait=false")
        (folder / "job.yaml").write_text(yaml.safe_dump(watched_job()))
        reader.kubectl("apply", "-f", str(folder / "job.yaml"))

        def status() -> dict[str, Any]:
            found: dict[str, Any] = reader.get("ztj", "watched").get("status", {})
            return found

        wait_until(
            lambda: status().get("progress", {}).get("step", 0) >= 5, "five steps", timeout_s=240, every_s=0.5
        )
        pod = reader.get("pods", "-l", "zerotrain.dev/job=watched,zerotrain.dev/rank=0")["items"][0]
        values = {
            "JOB": "watched",
            "NAMESPACE": pod["metadata"]["namespace"],
            "POD": pod["metadata"]["name"],
            "NODE": pod["spec"]["nodeName"],
            "RANK": "1",
            "ATTEMPT": "1",
            "CODE": "137",
            "IMAGE": watched_job()["spec"]["image"],
            "OPERATOR_NAMESPACE": "zerotrain-system",
        }
        yield Watched(values=values, shell=Shell(environ=shell.environ, folder=folder))
        reader.kubectl("delete", "ztj", "watched", "--wait=false")

    def test_it_answers_every_command_of_the_runbooks(self, watched: Watched) -> None:
        texts = sorted(
            {
                # Metrics are more than a pipe holds, and in this shell a program that `head` cuts off has
                # failed.
                shown.filled(watched.values).removesuffix(" | head")
                for shown in commands()
                if not any(part in shown.text for part in NEEDS_MORE)
            }
        )
        with ThreadPoolExecutor(2) as pool:
            answers = dict(zip(texts, pool.map(watched.refusal, texts), strict=True))
        wanted = {
            text: next((words for part, words in REFUSALS.items() if part in text), "") for text in texts
        }
        # Success where a refusal is expected is wrong too: the table would hide the next refusal.
        wrong = [
            f"$ {text}\n{found or 'it succeeded'}"
            for text, found in answers.items()
            if bool(found) != bool(wanted[text]) or wanted[text] not in found
        ]
        assert not wrong, "\n".join(wrong)

    def test_its_report_is_a_page_that_a_browser_shows(self, watched: Watched, tmp_path: Path) -> None:
        file = tmp_path / "report.html"
        watched.answer(f"zerotrain report watched --file {file}")
        text = file.read_text()
        check_self_contained(text)
        assert text.count("<svg") >= 6
        browser = find_browser(tmp_path)
        shown = Page(browser.dom(file))
        assert shown.headings[0] == "watched"
        # Nothing failed, and a CPU has no peak from a data sheet.
        assert set(TITLES) - {"Failures", "MFU"} <= set(shown.headings)
        image = tmp_path / "report.png"
        browser.screenshot(file, image, width=1000, height=2100)
        assert paper(image, parts=3) > 0.9

    def test_the_advised_roles_are_enough_to_look_and_to_change(
        self, watched: Watched, reader: Cluster, tmp_path: Path
    ) -> None:
        """The roles `zerotrain-viewer` and `zerotrain-editor` are those that every refusal advises."""
        viewer, editor = (Person(reader, watched.values["NAMESPACE"], role, tmp_path) for role in ROLES)
        for who in (viewer, editor):
            for command in LOOKS:
                assert who.types(command).code == 0, f"{who.role}: {command}"
            assert who.types(f"report watched --file {tmp_path / who.role}.html").code == 0
        for command in CHANGES:
            assert editor.types(command).code == 0, command
            refused = viewer.types(command)
            assert (refused.code, "zerotrain-editor" in refused.err) == (CommandExit.FORBIDDEN, True), command
        # Only an editor reaches the workers; a viewer is shown what the operator keeps, with the reason.
        kept, asked = (json.loads(who.types("top watched --once -o json").out) for who in (viewer, editor))
        assert (kept["is_kept"], "pods/proxy" in kept["problem"]) == (True, True)
        assert (asked["is_kept"], len(asked["ranks"])) == (False, 2)
        assert "pods/proxy" in (tmp_path / "viewer.html").read_text()

    def test_the_doctor_looks_from_inside_the_cluster(self, watched: Watched, reader: Cluster) -> None:
        command = next(shown for shown in commands() if "zerotrain doctor --pod" in shown.text)
        answers = watched.answer(f"{command.filled(watched.values)} -o json")
        # The output also has the messages on standard error.
        found = from_records(json.loads(next(line for line in answers.splitlines() if line.startswith("["))))
        groups = {item.group for item in found}
        assert groups == {"drive", "kernel", "memory", "processor", "gpu", "nccl", "network"}
        policies = [
            (item.name.split()[0], item.state, item.value)
            for item in found
            if item.name.startswith(("reach ", "refuse "))
        ]
        # The network plug-in here enforces no policy, and the doctor must report it: for a peer and for the
        # API server.
        leaky = ("refuse", State.WARN, "open")
        assert policies == [("reach", State.OK, "open"), leaky, leaky]
        wait_until(
            lambda: reader.get("pods,networkpolicies", "-l", "zerotrain.dev/doctor")["items"] == [],
            "the doctor's pods and policies to go",
        )

    def test_the_doctor_reports_why_its_pod_does_not_run(self, watched: Watched) -> None:
        image = watched.values["IMAGE"]
        wrong = {
            "--image localhost/no-such:1": "ErrImagePull|ImagePullBackOff",
            f"--image {image} --node nowhere": "Unschedulable 0/1 nodes",
        }
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(
                lambda options: watched.refusal(f"zerotrain doctor --pod --timeout 25 {options}"), wrong
            )
        for (options, why), text in zip(wrong.items(), answers, strict=True):
            assert "did not finish within 25 s" in text, options
            assert re.search(why, text), options
            assert "next: correct what it waits for" in text, options


@pytest.mark.parametrize("names", RUN_TOGETHER)
def test_small_examples_run_to_their_end(reader: Cluster, names: tuple[str, ...]) -> None:
    """The examples need the operator that the page installed."""
    # If the page failed, its second job would take these jobs' time; the page itself deletes the first.
    reader.kubectl("delete", "ztj", "second", "--ignore-not-found", "--wait=false")
    files = [part for name in names for part in ("-f", str(EXAMPLES / f"{name}.yaml"))]
    reader.kubectl("apply", *files)

    def ended() -> bool:
        jobs = json.loads(reader.kubectl("get", *files, "-o", "json").stdout)["items"]
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


def test_an_own_program_stops_with_a_checkpoint_that_the_status_names(
    reader: Cluster, tmp_path: Path
) -> None:
    """own-script.yaml with more steps than any test waits for. It needs the operator, too."""
    text = (EXAMPLES / "own-script.yaml").read_text().replace("own-script", "own-yield")
    file = tmp_path / "own-yield.yaml"
    file.write_text(text.replace('args: ["60"]', 'args: ["1000000"]'))
    reader.kubectl("apply", "-f", str(file))

    def status() -> dict[str, Any]:
        found: dict[str, Any] = reader.get("ztj", "own-yield").get("status", {})
        return found

    def suspend(wanted: bool) -> None:
        change = json.dumps({"spec": {"suspend": wanted}})
        reader.kubectl("patch", "ztj", "own-yield", "--type=merge", "-p", change)

    def steps() -> int:
        return int(status().get("progress", {}).get("step", 0))

    wait_until(lambda: steps() >= 5, "five steps", timeout_s=240, every_s=0.5)
    assert status()["progress"]["phase"] == "step"
    suspend(True)
    wait_until(lambda: status()["phase"] == "Suspended", "the suspension", timeout_s=120, every_s=0.5)
    stopped = status()
    last = stopped["checkpoint"]["last"]
    assert (last["step"], last["durable"]) == (stopped["progress"]["step"], True)
    assert last["path"] == f"/checkpoints/own-yield/step-{last['step']:010}-attempt-1"
    durable = next(item for item in stopped["conditions"] if item["type"] == "CheckpointDurable")
    assert (durable["status"], durable["message"]) == ("True", f"step {last['step']}")
    suspend(False)
    wait_until(
        lambda: status()["checkpoint"].get("resumedFromStep") == last["step"] and steps() > last["step"],
        "the next attempt to go on from there",
        timeout_s=240,
        every_s=0.5,
    )
    reader.kubectl("delete", "-f", str(file), "--wait=false")


@pytest.mark.parametrize(
    "name",
    [
        *with_slow_rows(["hf-trainer", "finetune-lora"], quick=["hf-trainer"]),
        *(pytest.param(name, marks=ON_REQUEST) for name in ("sft-lora", "dpo", "own-accelerate")),
    ],
)
def test_a_script_of_others_survives_a_kill(reader: Cluster, name: str) -> None:
    """A pod is killed after the first checkpoint, and the job goes on from it."""
    files = ("-f", str(EXAMPLES / f"{name}.yaml"))
    reader.kubectl("apply", *files)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = reader.get("ztj", name).get("status", {})
        return found

    def saved() -> int:
        found = status()
        assert found.get("phase") != "Failed", found["conditions"]
        return int((found.get("checkpoint", {}).get("last") or {}).get("step", 0))

    wait_until(lambda: saved() > 0, "a checkpoint", timeout_s=480, every_s=0.5)
    path = status()["checkpoint"]["last"]["path"]
    assert path.startswith(f"/checkpoints/{name}/script/")
    pod = reader.get("pods", "-l", f"zerotrain.dev/job={name}")["items"][1]["metadata"]["name"]
    reader.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    wait_until(lambda: status()["phase"] == "Completed", "the job to complete", timeout_s=480, every_s=0.5)
    assert status()["checkpoint"]["resumedFromStep"] > 0
    reader.kubectl("delete", *files, "--wait=false")


def test_the_page_cleans_up(shell: Shell, page: dict[str, Block]) -> None:
    shell.run(page["clean"])


def test_the_page_without_a_cluster(shell: Shell, page: dict[str, Block]) -> None:
    shutil.rmtree(REPOSITORY / "build" / "quickstart", ignore_errors=True)
    shell.run(page["local"])


def test_every_block_of_the_page_is_executed(page: dict[str, Block]) -> None:
    assert set(page) == {"install", "job", "look", "break", "clean", "local"}
