"""Progress of workers, read through a pod proxy: merged and bounded; hostile answers are ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import small_api
from tests.support.commands import zerotrain
from tests.support.job_states import job, pod
from zerotrain.client import Client, WorkerError, snapshot
from zerotrain.client.command_exits import CommandExit
from zerotrain.client.snapshot import Mark
from zerotrain.contract.progress import Motion, Phase, Progress, Straggler
from zerotrain.contract.worker_http import WorkerReport

pytestmark = pytest.mark.ranks


METRICS = """\
# HELP zerotrain_step Steps.
# TYPE zerotrain_step gauge
zerotrain_step{{job_name="gpt",rank="{rank}"}} {step}
"""


class FakeServer:
    """API server with one job and its pods; workers give the answers that the test sets."""

    def __init__(self) -> None:
        self.job = job()
        self.pods = [pod(0), pod(1)]
        self.answers: dict[str, tuple[int, bytes]] = {}
        """Answers by the path behind `/proxy`, after the pod's name."""
        self.asked: list[str] = []
        self.everything: tuple[int, bytes] | None = None
        for worker in (0, 1):
            self.set_progress(worker)

    def set_progress(self, worker: int, **changes: object) -> None:
        """Set the progress report of a worker of two ranks."""
        ranks = tuple(
            Progress(
                rank=rank,
                attempt=2,
                phase=Phase.STEP,
                step=61,
                step_seconds=0.5,
                collective_wait_seconds=0.0 if rank == 3 else 40.0,
                host_peak_bytes=(rank + 1) << 20,
                straggler=Straggler(rank=1, own_seconds=2, median_seconds=1) if rank == 0 else None,
                motion=Motion(idle_seconds=45 if rank == 3 else 0.1, silent_seconds=0.1),
            )
            for rank in (2 * worker, 2 * worker + 1)
        )
        report = WorkerReport(job="gpt", job_uid="u", attempt=2, node_rank=worker, world_size=4, ranks=ranks)
        self.answers[f"gpt-2-{worker}/progress"] = (200, report.to_json().encode())
        self.answers[f"gpt-2-{worker}/metrics"] = (200, METRICS.format(rank=2 * worker, step=61).encode())

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.everything is not None:
            return self.everything
        if "/proxy/" in path:
            name = path.split("/pods/")[1].split(":")[0]
            return self.answers[f"{name}/{path.rsplit('/', 1)[1]}"]
        if path.startswith("/api/v1/namespaces/ml/pods?"):
            return 200, json.dumps({"items": [item.raw for item in self.pods]}).encode()
        return 200, json.dumps(self.job.raw).encode()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[FakeServer, Path]]:
    """The server, and a kubeconfig that leads to it."""
    state = FakeServer()
    with small_api.served(state.answer, tmp_path) as path:
        yield state, path


def test_all_ranks_and_all_metrics_come_together(fake: tuple[FakeServer, Path]) -> None:
    client = Client.connect(fake[1])
    assert client.namespace == "ml"
    progress = client.progress("gpt")
    assert [rank.rank for rank in progress.ranks] == [0, 1, 2, 3]
    (family,) = client.metrics("gpt")
    assert (family.name, family.type) == ("zerotrain_step", "gauge")
    assert family.value(rank="2", pod="gpt-2-1") == 61
    assert client.worker_text("gpt", "/metrics", worker=1) == METRICS.format(rank=2, step=61)
    assert client.worker_text("gpt", "/metrics", worker=7) is None


def test_a_look_marks_who_is_slow_and_who_stands_still(fake: tuple[FakeServer, Path]) -> None:
    look = snapshot.take(Client.connect(fake[1]), "gpt")
    assert [row.mark for row in look.rows] == [Mark.FINE, Mark.SLOW, Mark.FINE, Mark.STILL]
    assert [row.node for row in look.rows] == ["node-a", "node-a", "node-b", "node-b"]
    assert [(tier.tier, tier.taken) for tier in look.tiers] == [("host", 4 << 20)]
    done = zerotrain("top", "gpt", "--once", kubeconfig=fake[1])
    assert done.code == 0
    assert "straggler" in done.out
    assert "no progress" in done.out


@pytest.mark.parametrize(
    "answer",
    [
        (503, b"error trying to reach service: connection refused"),
        (200, b"{"),
        (200, b'{"job":1}'),
        (200, b"[" * 100_000),
        (302, b""),
        (200, b"x" * (9 << 20)),
    ],
    ids=["down", "cut", "another shape", "nested", "redirect", "endless"],
)
def test_one_worker_that_lies_is_reported_and_the_rest_is_shown(
    fake: tuple[FakeServer, Path], answer: tuple[int, bytes]
) -> None:
    state, kubeconfig = fake
    state.answers["gpt-2-1/progress"] = answer
    progress = Client.connect(kubeconfig).progress("gpt")
    assert [rank.rank for rank in progress.ranks] == [0, 1]
    assert list(progress.silent) == ["gpt-2-1"]
    assert "/secret" not in state.asked


def test_no_worker_answers(fake: tuple[FakeServer, Path]) -> None:
    state, kubeconfig = fake
    for name in ("gpt-2-0/progress", "gpt-2-1/progress"):
        state.answers[name] = (503, b"dial tcp: i/o timeout")
    with pytest.raises(WorkerError, match="i/o timeout") as caught:
        Client.connect(kubeconfig).progress("gpt")
    assert "jobs.extraHttpCidrs" in str(caught.value.next_step)
    state.answers["gpt-2-0/history"] = (504, b"context deadline exceeded")
    with pytest.raises(WorkerError, match="deadline exceeded") as caught:
        Client.connect(kubeconfig).worker_text("gpt", "/history")
    assert "jobs.extraHttpCidrs" in str(caught.value.next_step)
    done = zerotrain("top", "gpt", "--count", "1", kubeconfig=kubeconfig)
    assert (done.code, "i/o timeout" in done.out) == (0, True)
    assert "jobs.extraHttpCidrs" in done.out


REFUSED = json.dumps({"kind": "Status", "code": 403, "message": "you cannot get pods/proxy"}).encode()
BARRED = [(403, REFUSED, "pods/proxy"), (503, b"dial tcp: i/o timeout", "i/o timeout")]


@pytest.mark.parametrize(("code", "body", "why"), BARRED, ids=["forbidden", "network policy"])
def test_without_a_way_to_the_workers_the_status_is_shown(
    fake: tuple[FakeServer, Path], code: int, body: bytes, why: str
) -> None:
    state, kubeconfig = fake
    for name in ("gpt-2-0/progress", "gpt-2-1/progress"):
        state.answers[name] = (code, body)
    slow = {"attempt": 2, "rank": 3, "pod": "gpt-2-1", "node": "node-b", "percent": 80}
    state.job = job({"straggler": slow})
    done = zerotrain("top", "gpt", "--once", kubeconfig=kubeconfig)
    assert done.code == 0, done.err
    assert "the workers did not answer: these are the values in the job's status" in done.out
    assert why in done.out
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["0", "step", "60"], ["3", "-", "60"]]
    assert rows[1][-3:] == ["gpt-2-1", "node-b", "straggler"]


def test_workers_that_cannot_be_reached_are_not_asked_at_every_look(fake: tuple[FakeServer, Path]) -> None:
    state, kubeconfig = fake
    state.answers["gpt-2-0/progress"] = state.answers["gpt-2-1/progress"] = (503, b"i/o timeout")
    poller = snapshot.SnapshotPoller(Client.connect(kubeconfig), "gpt")
    assert poller.take().is_kept
    asked = [path for path in state.asked if "/proxy/" in path]
    state.job = job({"progress": {**state.job.raw["status"]["progress"], "step": 70}})
    second = poller.take()
    assert [row.step for row in second.rows] == [70]
    assert "i/o timeout" in second.problem
    assert [path for path in state.asked if "/proxy/" in path] == asked
    state.job = job({"attempt": 3, "progress": {"attempt": 3, "step": 71, "phase": "step"}})
    state.set_progress(0)
    assert not poller.take().is_kept


def test_where_the_first_ones_are_all_silent_the_others_are_left_alone(
    fake: tuple[FakeServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerotrain.client.scrape.CALLS_AT_ONCE", 1)
    state, kubeconfig = fake
    state.answers["gpt-2-0/progress"] = (503, b"i/o timeout")
    with pytest.raises(WorkerError, match="none of 1 workers"):
        Client.connect(kubeconfig).progress("gpt")


def test_reports_of_an_earlier_attempt_are_not_shown(fake: tuple[FakeServer, Path]) -> None:
    state, kubeconfig = fake
    state.answers["gpt-2-0/progress"] = state.answers["gpt-2-1/progress"] = (503, b"i/o timeout")
    state.job = job({"progress": {"attempt": 1, "step": 60, "phase": "step"}})
    look = snapshot.take(Client.connect(kubeconfig), "gpt")
    assert (look.rows, look.is_kept) == ((), False)


def test_no_worker_runs(fake: tuple[FakeServer, Path]) -> None:
    state, kubeconfig = fake
    state.pods = []
    with pytest.raises(WorkerError, match="no worker of gpt is running"):
        Client.connect(kubeconfig).metrics("gpt")


def test_something_else_than_kubernetes_is_recognised(fake: tuple[FakeServer, Path]) -> None:
    state, kubeconfig = fake
    state.everything = (200, b"<html>login</html>")
    done = zerotrain("get", kubeconfig=kubeconfig)
    assert done.code == CommandExit.SERVER_ERROR
    assert "is there a proxy in front of it" in done.err
