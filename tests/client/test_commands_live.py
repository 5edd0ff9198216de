"""The life of a job by `zerotrain` alone: a real API server, a real operator, and doubles of the nodes."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.operator.kubelet_double import KubeletDouble, kubelet, wait_for_step
from tests.operator.kubelet_logs import KubeletLogs, served_logs
from tests.operator.operator_process import KEY
from tests.support.commands import Done, zerotrain
from tests.support.devcluster import PATIENCE_S, Cluster, wait_until
from tests.support.jobs import job_json
from tests.support.kube_json import KubeJson
from zerotrain.client import Client
from zerotrain.client.command_exits import CommandExit

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("running_operator")]

Command = Callable[..., Done]


def log_of(worker: int, lines: int, *, stamped: bool = True) -> bytes:
    """Return a log as a kubelet serves it: timestamps if `stamped`, the launcher's marks, a colour, and an
    attack on the terminal.
    """
    text = "".join(
        (f"2026-03-01T10:00:{line:02d}.{worker}00000000Z " if stamped else "")
        + f"{f'[rank {rank}] ' if rank else ''}\x1b[32mline {line} of rank {rank}\x1b[0m\x1b]0;x\x07\n"
        for line in range(lines)
        for rank in (2 * worker, 2 * worker + 1)
    )
    return text.encode()


@pytest.fixture
def node(control_plane: Cluster, api: KubeJson) -> Iterator[tuple[str, KubeletLogs]]:
    """Node of the test's own that serves logs."""
    name = f"double-{secrets.token_hex(3)}"
    with served_logs(control_plane, api, name) as logs:
        yield name, logs


@pytest.fixture
def double(api: KubeJson, namespace: str, node: tuple[str, KubeletLogs]) -> Iterator[KubeletDouble]:
    with kubelet(api, namespace, KEY, steps=10**6) as running:
        running.nodes = (node[0],)
        yield running


@pytest.fixture
def run(control_plane: Cluster, namespace: str) -> Command:
    """Runner of `zerotrain ... -n NAMESPACE`."""

    def command(*args: str | Path) -> Done:
        return zerotrain(*args, "-n", namespace, kubeconfig=control_plane.kubeconfig)

    return command


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def write_job(folder: Path, **spec: object) -> Path:
    path = folder / "job.yaml"
    raw = job_json({"spec.steps": 10**6, **{f"spec.{name}": value for name, value in spec.items()}})
    raw["metadata"] = {"name": "gpt"}
    path.write_text(json.dumps(raw))
    return path


def ok(done: Done) -> str:
    assert done.code == 0, done.err
    return done.out


def test_from_submit_over_a_failure_and_a_suspension_to_delete(
    run: Command, job: Path, double: KubeletDouble, node: tuple[str, KubeletLogs], namespace: str
) -> None:
    logs = node[1]
    assert ok(run("submit", job, "--dry-run", "server")).endswith("created (server dry run)\n")
    assert run("get", "gpt").code == CommandExit.NOT_FOUND
    assert ok(run("submit", job, "-o", "name")) == "zerotrainingjob.zerotrain.dev/gpt\n"
    assert "running" in ok(run("wait", "gpt", "--for", "running", "--timeout", "150")).lower()
    wait_for_step(double, 10)
    ok(run("wait", "gpt", "--for", "step=5", "--timeout", "150"))
    header, row = ok(run("get")).splitlines()
    assert header.split()[:4] == ["NAME", "PHASE", "STEP", "RANKS"]
    assert re.match(r"gpt +Running +\d+/1000000 +4/4 +3 ", row)
    assert json.loads(ok(run("get", "gpt", "-o", "json")))["metadata"]["name"] == "gpt"
    again = run("submit", job)
    assert (again.code, "--replace" in again.err) == (CommandExit.CONFLICT, True)

    logs.texts |= {f"gpt-1-{worker}": log_of(worker, 40, stamped=False) for worker in (0, 1)}
    double.end("gpt-1-1", 1, exception="RuntimeError: \x1b[2Jboom")
    wait_until(lambda: len(double.trainings()) == 2, "the second attempt")
    text = ok(run("describe", "gpt"))
    assert re.search(r"! attempt 1 ended at step \d+: RankFailed \(rank 2, pod gpt-1-1, node double-", text)
    assert "RuntimeError: boom" in text
    assert f"zerotrain logs gpt -n {namespace} --attempt 1" in text
    assert "\x1b" not in text

    kept = run("logs", "gpt", "--attempt", "1", "--rank", "2")
    assert kept.out.splitlines()[-1].endswith("line 39 of rank 2")
    assert "\x1b" not in kept.out
    assert "has no pods any more" in kept.err

    ok(run("wait", "gpt", "--for", "running", "--timeout", "150"))
    assert re.match(
        r"gpt is suspended; it resumes from step \d+", ok(run("suspend", "gpt", "--wait")).splitlines()[-1]
    )
    assert ok(run("suspend", "gpt")) == "gpt is suspended already\n"
    assert f"$ zerotrain resume gpt -n {namespace}" in ok(run("describe", "gpt"))
    assert ok(run("resume", "gpt", "--wait", "--timeout", "150")).endswith("gpt is running\n")
    assert ok(run("delete", "gpt", "--wait", "--timeout", "150")) == "gpt deleted\n"
    assert run("get").err.startswith("no jobs in namespace")
    assert ok(run("delete", "gpt", "--ignore-not-found")) == ""


def test_lines_of_all_ranks_come_in_the_order_of_time(
    run: Command, job: Path, double: KubeletDouble, node: tuple[str, KubeletLogs]
) -> None:
    ok(run("submit", job))
    wait_for_step(double, 2)
    waiting = run("logs", "gpt", "--rank", "9")
    assert waiting.code == CommandExit.NOT_FOUND or "no lines" in waiting.err
    node[1].texts |= {f"gpt-1-{worker}": log_of(worker, 3) for worker in (0, 1)}
    lines = ok(run("logs", "gpt")).splitlines()
    assert lines == [f"[rank {rank}] line {line} of rank {rank}" for line in range(3) for rank in range(4)]
    assert ok(run("logs", "gpt", "--rank", "3", "--tail", "1")) == "line 2 of rank 3\n"
    stamped = ok(run("logs", "gpt", "--rank", "0,2-3", "--timestamps")).splitlines()
    assert stamped[1] == "2026-03-01T10:00:00.100000 [rank 2] line 0 of rank 2"


def test_following_goes_on_into_the_next_attempt(
    control_plane: Cluster,
    namespace: str,
    run: Command,
    job: Path,
    double: KubeletDouble,
    node: tuple[str, KubeletLogs],
) -> None:
    client = Client.connect(control_plane.kubeconfig, namespace=namespace)
    client.submit(job)
    wait_for_step(double, 2)
    node[1].texts |= {
        f"gpt-{attempt}-{worker}": f"attempt {attempt} worker {worker}\n".encode()
        for attempt in (1, 2)
        for worker in (0, 1)
    }
    seen: list[str] = []
    thread = threading.Thread(
        target=lambda: seen.extend(line.text for line in client.logs("gpt", follow=True)), daemon=True
    )
    thread.start()
    wait_until(lambda: sum("follow=true" in path for path in node[1].asked) >= 2, "both logs to be followed")
    double.end("gpt-1-0", 137)
    wait_until(
        lambda: sum("gpt-2-" in path for path in node[1].asked) >= 2, "the next attempt to be followed"
    )
    wait_until(lambda: len(set(seen)) >= 4, "a line of every worker")
    client.delete("gpt")
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()
    assert set(seen) == {f"attempt {attempt} worker {worker}" for attempt in (1, 2) for worker in (0, 1)}


def test_replacing_removes_what_the_file_no_longer_has(
    control_plane: Cluster, run: Command, tmp_path: Path, namespace: str
) -> None:
    full = write_job(tmp_path, hangPolicy={"minTimeoutSeconds": 900}, suspend=True)
    raw = json.loads(full.read_text())
    raw["metadata"]["labels"] = {"team": "a", "dropped": "yes"}
    full.write_text(json.dumps(raw))
    assert ok(run("submit", full, "--replace")).splitlines()[0].endswith("gpt created")
    control_plane.kubectl("label", "-n", namespace, "zerotrainingjob", "gpt", "others=kept")
    bare = write_job(tmp_path, suspend=True)
    raw = json.loads(bare.read_text())
    raw["metadata"]["labels"] = {"team": "b"}
    bare.write_text(json.dumps(raw))
    assert ok(run("submit", bare, "--replace")).splitlines()[0].endswith("gpt changed")
    found = json.loads(ok(run("get", "gpt", "-o", "json")))
    assert "minTimeoutSeconds" not in json.dumps(found["spec"])
    assert found["metadata"]["labels"] == {"team": "b", "others": "kept"}


def test_what_may_not_change_is_refused_with_the_field(
    run: Command, job: Path, double: KubeletDouble, tmp_path: Path
) -> None:
    ok(run("submit", job))
    refused = run("scale", "gpt", "--workers", "3")
    assert refused.code == CommandExit.INVALID
    assert "spec" in refused.err
    assert "workers" in refused.err
    changed = json.loads(job.read_text())
    changed["spec"]["ranksPerWorker"] = 1
    job.write_text(json.dumps(changed))
    assert run("submit", job, "--replace").code == CommandExit.INVALID
    ok(run("suspend", "gpt", "--dry-run", "server"))
    assert json.loads(ok(run("get", "gpt", "-o", "json")))["spec"].get("suspend") in (None, False)


def test_a_job_that_fails_ends_the_wait_with_a_next_step(
    run: Command, job: Path, double: KubeletDouble, namespace: str
) -> None:
    ok(run("submit", job))
    wait_for_step(double, 2)
    double.end("gpt-1-0", 65, exception="DataError: data.path is empty")
    waited = run("wait", "gpt", "--for", "complete", "--timeout", "150")
    assert waited.code == CommandExit.JOB_FAILED
    assert f"next: zerotrain describe gpt -n {namespace}" in waited.err
    text = ok(run("describe", "gpt"))
    assert text.startswith("gpt has failed")
    assert "correct data.path, or the volume that holds it" in text
    assert run("wait", "gpt", "--for", "failed").code == 0
    record = json.loads(ok(run("describe", "gpt", "-o", "json")))
    assert record["phase"] == "Failed"
    assert record["advice"]


def test_a_wait_has_an_end(run: Command, job: Path, double: KubeletDouble) -> None:
    double.start_up = False
    ok(run("submit", job))
    waited = run("wait", "gpt", "--for", "running", "--timeout", "1")
    assert waited.code == CommandExit.TIMED_OUT
    nothing = run("logs", "gpt")
    assert nothing.code == CommandExit.NOT_FOUND
    assert "zerotrain describe gpt" in nothing.err
