"""Logs of many pods: one that cannot be read leaves the others readable, a cut connection loses no line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support import small_api
from tests.support.commands import zerotrain
from tests.support.job_states import job, pod, stamp
from zerotrain.client import Client, ForbiddenError, ServerError, TooManyLogsError, logs
from zerotrain.client.command_exits import CommandExit
from zerotrain.operator.cluster.actions.diagnostics import MAX_LINES

pytestmark = pytest.mark.ranks


ENDED = {"terminated": {"exitCode": 0}}
DIAL = (500, b"dial tcp 10.0.0.7:10250: i/o timeout \x1b]0;owned\x07")


class Logs:
    """API server with one job of two workers; each request for a log takes the pod's next answer."""

    def __init__(self) -> None:
        self.job = job()
        self.pods = [pod(0), pod(1)]
        self.answers: dict[str, list[tuple[int, bytes]]] = {}
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.looks: list[str] = []
        self.kept: dict[str, str] = {}

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
        if url.path.endswith("/configmaps/gpt-failures"):
            return 200, json.dumps({"data": self.kept}).encode()
        if url.path.endswith("/pods"):
            return self.pods_answer("watch" in url.query)
        return 200, json.dumps(self.job.raw).encode()

    def pods_answer(self, watches: bool) -> tuple[int, bytes]:
        """Return the list of pods, or, for a watch, one event per pod half a second later."""
        self.looks.append("watch" if watches else "list")
        if not watches:
            items = [item.raw for item in self.pods]
            return 200, json.dumps({"metadata": {"resourceVersion": "7"}, "items": items}).encode()
        time.sleep(0.5)
        events = [{"type": "MODIFIED", "object": item.raw} for item in self.pods]
        return 200, b"".join(json.dumps(event).encode() + b"\n" for event in events)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Logs, Path]]:
    """The server, and a kubeconfig that leads to it."""
    state = Logs()
    with small_api.served(state.answer, tmp_path) as path:
        yield state, path


def lines(*numbers: int) -> bytes:
    """Return log lines, two for each second, because the API server's `sinceTime` has a resolution of one
    second.
    """
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


def test_what_concerns_all_pods_is_reported_once(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    refused = (403, json.dumps({"kind": "Status", "message": "you cannot get pods/log"}).encode())
    state.answers = {"gpt-2-0": [refused], "gpt-2-1": [refused]}
    for follow in (False, True):
        problems: list[str] = []
        with pytest.raises(ForbiddenError):
            list(Client.connect(kubeconfig).logs("gpt", follow=follow, on_problem=problems.append))
        assert problems == []


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
    problems: list[str] = []
    found = list(Client.connect(kubeconfig).logs("gpt", follow=True, on_problem=problems.append))
    assert [line.text for line in found if line.worker == 0] == [f"line {number}" for number in range(4)]
    assert [line.text for line in found if line.worker == 1] == ["line 9"]
    assert len(problems) == (cut[0] != 200)
    # A follower lists pods only in its first look and in its last one.
    assert [look for look in state.looks if look == "list"] == ["list"] * 3
    opened = [query for name, query in state.asked if name == "gpt-2-0"]
    assert opened[1].get("sinceTime") == (["2026-03-01T10:00:01Z"] if cut[0] == 200 else None)


def test_more_workers_than_the_limit_are_refused_with_both_ways_out(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    done = zerotrain("logs", "gpt", "-f", "--max-log-requests", "1", kubeconfig=kubeconfig)
    assert done.code == CommandExit.USAGE
    assert "2 workers of gpt would be followed at once, and the limit is 1" in done.err
    assert "zerotrain logs gpt -n ml --rank 0-1 -f" in done.err
    assert "--max-log-requests 2" in done.err
    assert state.asked == []
    with pytest.raises(TooManyLogsError):
        list(Client.connect(kubeconfig).logs("gpt", follow=True, max_followed=1))


def test_a_limit_counts_the_workers_of_the_chosen_ranks(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    state.pods = [pod(0, state=ENDED), pod(1)]
    state.answers = {"gpt-2-1": [(200, lines(0, 1))]}
    done = zerotrain(
        *("logs", "gpt", "-f", "--rank", "2", "--no-prefix", "--max-log-requests", "1"), kubeconfig=kubeconfig
    )
    assert done.code == 0, done.err
    assert {name for name, _ in state.asked} == {"gpt-2-1"}
    state.job, state.pods = job(), [pod(0, state=ENDED), pod(1)]
    state.answers = {"gpt-2-1": [(200, lines(0, 1))], "gpt-2-0": [(200, lines(0, 1))]}
    assert zerotrain("logs", "gpt", "--max-log-requests", "1", kubeconfig=kubeconfig).code == 0


def test_an_attempt_that_grew_beyond_the_limit_is_followed_in_part(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    state.job = job({"workers": {"desired": 1}})
    state.answers = {"gpt-2-0": [(200, lines(0, 1))], "gpt-2-1": [(200, lines(2, 3))]}
    state.pods = [pod(0), pod(1, state=ENDED)]
    problems: list[str] = []
    found = list(
        Client.connect(kubeconfig).logs("gpt", follow=True, max_followed=1, on_problem=problems.append)
    )
    assert {line.worker for line in found} == {0}
    assert problems == ["attempt 2 has 2 workers; followed: the first 1"]


FAILED = {"attempt": 1, "time": stamp(300), "rank": 2, "pod": "gpt-1-1", "log": "attempt-1.log"}
LABELS = "zerotrain.dev/job=gpt and zerotrain.dev/attempt="


def kept_of_rank_2(state: Logs) -> None:
    """Set up a job whose attempt 1 failed by rank 2 and whose attempt 2 completed; all pods are gone."""
    state.pods = []
    state.job = job({"phase": "Completed", "attempt": 2, "failures": [FAILED]})
    state.kept = {"attempt-1.log": "title\n" + "".join(f"[rank 2] line {number}\n" for number in range(9))}


def test_for_deleted_pods_the_message_names_the_kept_lines_and_where_the_rest_is(
    served: tuple[Logs, Path],
) -> None:
    state, kubeconfig = served
    kept_of_rank_2(state)
    done = zerotrain("logs", "gpt", "--attempt", "1", "--tail", "2", kubeconfig=kubeconfig)
    assert (done.code, done.out) == (0, "[rank 2] line 7\n[rank 2] line 8\n"), done.err
    assert "attempt 1 has no pods any more; only the last lines (up to 100) of rank 2" in done.err
    assert "were kept. A log collector of the cluster, if there is one, has all other lines" in done.err
    assert f"{LABELS}1" in done.err


def test_of_a_rank_or_an_attempt_that_did_not_fail_nothing_is_left(served: tuple[Logs, Path]) -> None:
    state, kubeconfig = served
    kept_of_rank_2(state)
    done = zerotrain("logs", "gpt", "--attempt", "1", "--rank", "0", kubeconfig=kubeconfig)
    assert (done.code, done.out) == (0, "")
    assert "only the last lines (up to 100) of rank 2" in done.err
    assert "no lines of these ranks" in done.err
    done = zerotrain("logs", "gpt", kubeconfig=kubeconfig)
    assert done.out.count("line") == 9
    assert "attempt 2 has no pods any more, and nothing of it was kept" in done.err
    assert "which failed in attempt 1" in done.err
    done = zerotrain("logs", "gpt", "--attempt", "2", kubeconfig=kubeconfig)
    assert (done.code, done.out) == (CommandExit.NOT_FOUND, "")
    assert "no lines of it were kept; lines were kept of attempts 1" in done.err
    assert f"{LABELS}2" in done.err


def test_the_limit_is_the_operators_own() -> None:
    assert logs.KEPT_LINES == MAX_LINES
