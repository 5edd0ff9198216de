"""Watches over an API server that fails: a passing error is reported once and the watch goes on, a lasting
one ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support import small_api
from tests.support.commands import zerotrain
from tests.support.job_states import job
from zerotrain.client import Client, ClientError, ForbiddenError, NotInstalledError, UnauthenticatedError
from zerotrain.client.command_exits import CommandExit

pytestmark = pytest.mark.ranks


Answer = tuple[int, bytes]


def change(kind: str, step: int, version: int) -> bytes:
    raw = job({"progress": {"step": step}}).raw
    meta = {**raw["metadata"], "resourceVersion": str(version)}
    return json.dumps({"type": kind, "object": {**raw, "metadata": meta}}).encode() + b"\n"


def listed(step: int | None, version: int) -> Answer:
    items = [job({"progress": {"step": step}}).raw] if step is not None else []
    return 200, json.dumps({"metadata": {"resourceVersion": str(version)}, "items": items}).encode()


def refused(code: int, reason: str = "") -> Answer:
    return code, json.dumps({"kind": "Status", "code": code, "message": reason or str(code)}).encode()


class Jobs:
    """One job; each list and each watch takes its next answer, and the last one is kept."""

    def __init__(self) -> None:
        self.lists: list[Answer] = [listed(1, 10)]
        self.watches: list[Answer] = []
        self.versions: list[str] = []

    def answer(self, path: str) -> Answer:
        url = urlsplit(path)
        query = parse_qs(url.query)
        if "watch" in query:
            self.versions += query["resourceVersion"]
            return self.watches.pop(0) if self.watches else refused(401, "the test is over")
        if url.path.endswith("/gpt"):
            return 200, json.dumps(job({"progress": {"step": 1}}).raw).encode()
        return self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Jobs, Path]]:
    monkeypatch.setattr("zerotrain.client.watching.FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr("zerotrain.client.watching.MAX_PAUSE_S", 0.05)
    state = Jobs()
    with small_api.served(state.answer, tmp_path) as path:
        yield state, path


EXPIRED = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "old"}}).encode()


@pytest.mark.parametrize(
    ("blips", "num_reports"),
    [
        ([refused(500)], 1),
        ([refused(429), refused(503), refused(500)], 1),
        ([(200, b'{"type": "MODIF')], 1),
        ([refused(500), (200, change("MODIFIED", 2, 11)), refused(500)], 2),
    ],
)
def test_a_blip_is_reported_once_and_the_watch_goes_on_from_where_it_was(
    served: tuple[Jobs, Path], blips: list[Answer], num_reports: int
) -> None:
    state, kubeconfig = served
    state.watches = [(200, change("MODIFIED", 2, 11)), *blips, (200, change("MODIFIED", 3, 12))]
    done = zerotrain("get", "-w", kubeconfig=kubeconfig)
    assert done.code == CommandExit.UNAUTHENTICATED, done.err
    assert [line.split()[2] for line in done.out.splitlines()] == ["STEP", "1/100", "2/100", "3/100"]
    assert done.err.count("trying again") == num_reports, done.err
    assert done.err.count("answers again") == num_reports
    assert state.versions[:2] == ["10", "11"]
    assert state.versions[-1] == "12"
    assert set(state.versions[1:-1]) == {"11"}


@pytest.mark.parametrize("expired", [refused(410), (200, EXPIRED)])
def test_a_version_that_is_too_old_is_listed_anew_without_a_word(
    served: tuple[Jobs, Path], expired: Answer
) -> None:
    state, kubeconfig = served
    state.lists = [listed(1, 10), listed(1, 10), listed(5, 20)]
    state.watches = [expired, (200, change("DELETED", 5, 21))]
    done = zerotrain("get", "-w", kubeconfig=kubeconfig)
    assert [line.split()[2] for line in done.out.splitlines()] == ["STEP", "1/100", "5/100"]
    assert state.versions == ["10", "20", "21"]
    assert "ml/gpt was deleted" in done.err
    assert "trying again" not in done.err


def test_a_job_that_went_while_the_server_was_away_is_missed(served: tuple[Jobs, Path]) -> None:
    state, kubeconfig = served
    state.lists = [listed(1, 10), refused(500), listed(None, 20)]
    state.watches = [refused(410)]
    done = zerotrain("get", "gpt", "-w", kubeconfig=kubeconfig)
    assert done.code == CommandExit.NOT_FOUND
    assert "gpt was deleted" in done.err


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refused(401), UnauthenticatedError),
        (refused(403), ForbiddenError),
        ((404, b"404 page not found"), NotInstalledError),
    ],
)
def test_what_does_not_heal_ends_the_watch(
    served: tuple[Jobs, Path], answer: Answer, kind: type[ClientError]
) -> None:
    state, kubeconfig = served
    state.lists = [listed(1, 10), answer]
    state.watches = [refused(410)]
    with pytest.raises(kind):
        list(Client.connect(kubeconfig).watch_list())


def test_a_server_that_never_answered_is_no_blip(served: tuple[Jobs, Path]) -> None:
    state, kubeconfig = served
    state.lists = [refused(500)]
    assert zerotrain("get", "-w", kubeconfig=kubeconfig).code == CommandExit.SERVER_ERROR


def test_who_may_not_watch_lists(served: tuple[Jobs, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotrain.client.watching.LIST_EVERY_S", 0.02)
    state, kubeconfig = served
    state.lists = [listed(1, 10), listed(1, 10), listed(2, 20)]
    state.watches = [refused(403)]
    done = zerotrain("get", "-w", kubeconfig=kubeconfig)
    assert [line.split()[2] for line in done.out.splitlines()] == ["STEP", "1/100", "2/100"]
