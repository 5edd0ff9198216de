"""Logs of many pods: one that cannot be read leaves the others readable, a cut connection loses no line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support import small_api
from tests.support.commands import zerotrain
from tests.support.job_states import job, pod
from zerotrain.client import Client, ForbiddenError, ServerError
from zerotrain.client.exit_codes import CommandExit

ENDED = {"terminated": {"exitCode": 0}}
DIAL = (500, b"dial tcp 10.0.0.7:10250: i/o timeout \x1b]0;owned\x07")


class Logs:
    """An API server with one job of two workers; each open of a log takes the pod's next answer."""

    def __init__(self) -> None:
        self.job = job()
        self.pods = [pod(0), pod(1)]
        self.answers: dict[str, list[tuple[int, bytes]]] = {}
        self.asked: list[tuple[str, dict[str, list[str]]]] = []

    def answer(self, path: str) -> tuple[int, bytes]:
        url = urlsplit(path)
        if url.path.endswith("/log"):
            name = url.path.split("/")[-2]
            self.asked.append((name, parse_qs(url.query)))
            answers = self.answers[name]
            if len(answers) > 1:
                return answers.pop(0)
            # The last answer of a followed log is the end of its container, then of the job.
            ended = [pod(worker, state=ENDED) for worker in (0, 1)]
            self.pods = [new if old.name == name else old for old, new in zip(self.pods, ended, strict=True)]
            if all(item.exit_code == 0 for item in self.pods):
                self.job = job({"phase": "Completed"})
            return answers[0]
        if url.path.endswith("/pods"):
            return 200, json.dumps({"items": [item.raw for item in self.pods]}).encode()
        return 200, json.dumps(self.job.raw).encode()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Logs, Path]]:
    """The server, and a kubeconfig that leads to it."""
    state = Logs()
    with small_api.served(state.answer, tmp_path) as path:
        yield state, path


def lines(*numbers: int) -> bytes:
    """Two lines have the time of one second, as the API server's `sinceTime` knows seconds alone."""
    return b"".join(
        f"2026-03-01T10:00:{number // 2:02d}.{number % 2}00000000Z line {number}\n".encode()
        for number in numbers
    )


def test_a_pod_that_cannot_be_reached_leaves_the_others_readable(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    state.answers = {"gpt-2-0": [DIAL], "gpt-2-1": [(200, lines(0, 1))]}
    done = zerotrain("logs", "gpt", "--no-prefix", kubeconfig=kubeconfig)
    assert (done.code, done.out) == (0, "line 0\nline 1\n")
    assert "logs of pod gpt-2-0 on node node-a cannot be read" in done.err
    assert "i/o timeout" in done.err
    assert "\x1b" not in done.err


def test_where_no_pod_can_be_read_the_first_reason_is_the_error(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    gone = (404, json.dumps({"kind": "Status", "message": "pods not found"}).encode())
    state.answers = {"gpt-2-0": [gone], "gpt-2-1": [DIAL]}
    with pytest.raises(ServerError, match="i/o timeout"):
        list(Client.connect(kubeconfig).logs("gpt"))
    assert zerotrain("logs", "gpt", kubeconfig=kubeconfig).code == CommandExit.SERVER_ERROR


def test_what_concerns_all_pods_is_told_once(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    refused = (403, json.dumps({"kind": "Status", "message": "you cannot get pods/log"}).encode())
    state.answers = {"gpt-2-0": [refused], "gpt-2-1": [refused]}
    for follow in (False, True):
        heard: list[str] = []
        with pytest.raises(ForbiddenError):
            list(Client.connect(kubeconfig).logs("gpt", follow=follow, on_problem=heard.append))
        assert heard == []


@pytest.mark.parametrize("cut", [(200, lines(0, 1, 2)), (502, b"bad gateway")])
def test_a_follower_opens_a_log_again_and_repeats_no_line(
    served: tuple[Logs, Path], monkeypatch: pytest.MonkeyPatch, cut: tuple[int, bytes]
) -> None:
    monkeypatch.setattr("zerotrain.client.log_follow.LOOK_EVERY_S", 0.1)
    state, kubeconfig = served
    state.answers = {
        "gpt-2-0": [cut, (200, lines(2, 3) if cut[0] == 200 else lines(0, 1, 2, 3))],
        "gpt-2-1": [(200, lines(9))],
    }
    heard: list[str] = []
    found = list(Client.connect(kubeconfig).logs("gpt", follow=True, on_problem=heard.append))
    assert [line.text for line in found if line.worker == 0] == [f"line {number}" for number in range(4)]
    assert [line.text for line in found if line.worker == 1] == ["line 9"]
    assert len(heard) == (cut[0] != 200)
    opened = [query for name, query in state.asked if name == "gpt-2-0"]
    assert opened[1].get("sinceTime") == (["2026-03-01T10:00:01Z"] if cut[0] == 200 else None)
