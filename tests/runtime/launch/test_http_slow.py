"""Clients that hold connections of the worker's HTTP server: others are answered, and each has a deadline."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.launcher import eventually, spec_for
from zerotrain.contract import channel_token
from zerotrain.contract.worker_http import TOKEN_HEADER, bearer
from zerotrain.runtime.launch.http_server import WorkerApi, WorkerHttpServer
from zerotrain.runtime.launch.http_slots import MAX_CONNECTIONS, MAX_OF_ONE_PEER, Slots
from zerotrain.runtime.launch.rank_table import RankTable

pytestmark = pytest.mark.ranks

TOKEN = channel_token.derive(b"k" * 32, "uid-1", 3)


def serving(slots: Slots[socket.socket], folder: Path) -> WorkerHttpServer:
    api = WorkerApi(
        rank_table=RankTable(spec_for(folder, ranks=1), built_in_trainer=False),
        attempt=3,
        token=TOKEN,
        request_stop=lambda: None,
        collect_stacks=lambda: "",
        read_history=lambda: b"",
    )
    return WorkerHttpServer("127.0.0.1", 0, api, slots)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WorkerHttpServer]:
    with serving(Slots(request_s=3600.0, answer_s=3600.0), tmp_path) as server:
        server.start()
        yield server
        server.shutdown()


def ask(server: WorkerHttpServer, headers: dict[str, str]) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/progress", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.status)


def half_a_request(server: WorkerHttpServer, source: str = "127.0.0.1") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), source_address=(source, 0))
    connection.sendall(b"GET /progress HTTP/1.1\r\nX: ")
    return connection


def test_requests_that_never_end_block_no_other_request(server: WorkerHttpServer) -> None:
    with ExitStack() as held:
        for _ in range(2 * MAX_CONNECTIONS):
            held.enter_context(half_a_request(server))
        assert [ask(server, {}) for _ in range(5)] == [200] * 5
        assert len(server.slots) <= MAX_OF_ONE_PEER


def test_from_many_addresses_neither(server: WorkerHttpServer) -> None:
    with ExitStack() as held:
        for host in range(2, 2 + 2 * MAX_CONNECTIONS):
            held.enter_context(half_a_request(server, f"127.0.0.{host}"))
        operator = bearer(channel_token.for_reading(TOKEN))
        assert [ask(server, operator) for _ in range(5)] == [200] * 5
        assert server.slots._trusted == {"127.0.0.1": None}


def test_what_the_operator_shows_for_a_report_does_not_stop_a_job(server: WorkerHttpServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    with connection, connection.makefile("rb") as answer:
        shown = bearer(channel_token.for_reading(TOKEN))[TOKEN_HEADER]
        head = f"POST /yield HTTP/1.0\r\n{TOKEN_HEADER}: {shown}\r\nContent-Length: 2\r\n\r\n{{}}"
        connection.sendall(head.encode())
        assert b" 403 " in answer.readline()


def test_a_request_that_comes_byte_by_byte_ends_at_its_deadline(tmp_path: Path) -> None:
    """Each byte comes well within the time of one read."""
    ended = threading.Event()
    with serving(Slots(request_s=0.5), tmp_path) as server:
        server.start()
        with half_a_request(server) as connection:

            def drip() -> None:
                while not ended.is_set():
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        return
                    time.sleep(0.02)

            thread = threading.Thread(target=drip)
            thread.start()
            eventually(lambda: len(server.slots) == 0)
            ended.set()
            thread.join()
        assert ask(server, {}) == 200
        server.shutdown()
