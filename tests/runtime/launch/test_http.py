"""The worker's HTTP server: rights to request a yield, the meaning of /ready, stacks of a hung rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import LOOPBACKS, need
from tests.support.launcher import eventually, launched, spec_for
from zerotrain.contract import channel_token
from zerotrain.contract.history import HISTORY_DIR, AttemptRecord, Point, file_name, read_lines, to_line
from zerotrain.contract.worker_http import HISTORY_PATH, TOKEN_HEADER, WorkerReport, bearer, yield_body
from zerotrain.runtime.launch.http_server import WorkerApi, WorkerHttpServer
from zerotrain.runtime.launch.rank_table import RankTable

pytestmark = pytest.mark.ranks


TOKEN = channel_token.derive(b"k" * 32, "uid-1", 3)

TRAINING = """
channel = RankChannel.from_env()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
step = 0
while True:
    step += 1
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=step, loss=float("nan")))
    time.sleep(0.02)
"""

HUNG = """
import threading
channel = RankChannel.from_env()
channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=1))

def waiting_for_a_peer_that_never_comes():
    threading.Lock().acquire()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

waiting_for_a_peer_that_never_comes()
"""


def test_the_history_next_to_the_checkpoints_is_served_by_the_first_worker(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / HISTORY_DIR
    folder.mkdir(parents=True)
    for attempt, uid in ((2, "uid-1"), (3, "uid-1"), (1, "another-job")):
        record = AttemptRecord(attempt=attempt, job="demo", job_uid=uid, time=float(attempt))
        (folder / file_name(attempt, uid)).write_text(to_line(record) + to_line(Point(step=attempt)) + "torn")
    place = tmp_path / "checkpoints"
    with launched(tmp_path, TRAINING, checkpoint_dir=place, token_path=token_file(tmp_path)) as launcher:
        status, body = launcher.request(HISTORY_PATH)
        assert status == 200
        history = read_lines(body.decode().splitlines())
        assert [(item.record.attempt, item.last_step) for item in history.attempts] == [(2, 2), (3, 3)]
        assert history.unreadable == 0
        launcher.popen.send_signal(signal.SIGTERM)
        launcher.finish()


def token_file(folder: Path) -> Path:
    path = folder / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o400)
    return path


def test_yield_needs_the_token_and_the_attempt(tmp_path: Path) -> None:
    with launched(tmp_path, TRAINING, token_path=token_file(tmp_path)) as launcher:
        launcher.wait_for_ranks()
        wrong_token = bearer(channel_token.derive(b"k" * 32, "uid-1", 2))
        cases = [
            (yield_body(3), {}, 401),
            (yield_body(3), {TOKEN_HEADER: f"Basic {TOKEN}"}, 401),
            (yield_body(3), wrong_token, 403),
            (yield_body(3), bearer(TOKEN[:-1]), 403),
            (yield_body(2), wrong_token, 403),
            (yield_body(2), bearer(TOKEN), 409),
            (b"{}", bearer(TOKEN), 400),
            (b"not json", bearer(TOKEN), 400),
            (b'{"attempt": true}', bearer(TOKEN), 400),
            (b"x" * 5000, bearer(TOKEN), 413),
        ]
        for body, headers, status in cases:
            assert launcher.request("/yield", body=body, headers=headers)[0] == status, (body, headers)
        assert not launcher.report()["stopping"]
        assert launcher.request("/yield", body=yield_body(3), headers=bearer(TOKEN))[0] == 202
        assert launcher.wait() == 75


def test_without_a_token_file_no_request_for_a_yield_is_accepted(tmp_path: Path) -> None:
    with launched(tmp_path, TRAINING) as launcher:
        assert launcher.request("/yield", body=yield_body(3), headers=bearer(TOKEN))[0] == 403
        assert launcher.request("/yield", body=yield_body(3), headers=bearer(""))[0] == 401


def test_report_is_the_contracts_and_survives_a_nan_loss(tmp_path: Path) -> None:
    with launched(tmp_path, TRAINING, world_size=4, node_rank=1) as launcher:
        launcher.wait_for_ranks()
        text = launcher.request("/progress")[1].decode()
        assert "NaN" not in text
        report = WorkerReport.from_json(text)
    assert (report.job, report.job_uid, report.attempt, report.node_rank) == ("demo", "uid-1", 3, 1)
    assert [rank.rank for rank in report.ranks] == [2, 3]
    assert report.ready
    assert report.ranks[0].heartbeat_at > 0


@pytest.mark.parametrize(("phase", "status"), [("INIT", 503), ("RENDEZVOUS", 503), ("FIRST_STEP", 200)])
def test_ready_means_past_the_rendezvous(tmp_path: Path, phase: str, status: int) -> None:
    text = f"""
    channel = RankChannel.from_env()
    phase = Phase.{phase} if RANK else Phase.STEP
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=phase, step=1))
    time.sleep(600)
    """
    with launched(tmp_path, text) as launcher:
        launcher.wait_for_ranks()
        assert launcher.request("/ready")[0] == status


def test_program_that_never_reports_is_ready_while_it_runs(tmp_path: Path) -> None:
    with launched(tmp_path, "", command=["/bin/sh", "-c", "echo started; exec sleep 600"]) as launcher:
        eventually(lambda: launcher.request("/ready")[0] == 200)
        assert launcher.report()["ranks"][0]["heartbeat_at"] == 0
        assert launcher.request("/metrics")[0] == 200
        launcher.popen.send_signal(signal.SIGTERM)
        assert launcher.wait() == 143


def test_stacks_of_a_rank_that_hangs(tmp_path: Path) -> None:
    with launched(tmp_path, HUNG) as launcher:
        launcher.wait_for_ranks()
        first, second = (launcher.request("/stacks") for _ in range(2))
    for status, body in (first, second):
        text = body.decode()
        assert status == 200
        assert text.count("waiting_for_a_peer_that_never_comes") == 2, text
        assert text.index("=== rank 0") < text.index("=== rank 1")


def test_stopped_ranks_block_no_request(tmp_path: Path) -> None:
    """SIGSTOP stops a rank completely: even its heartbeat thread stands still."""
    with launched(tmp_path, TRAINING) as launcher:
        launcher.wait_for_ranks()
        text = launcher.request("/stacks")[1].decode()
        pids = [
            int(line.split("pid ")[1].split(",")[0]) for line in text.splitlines() if line.startswith("===")
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for path in ("/ready", "/progress", "/metrics", "/stacks"):
            assert launcher.request(path)[0] == 200
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_idle_connections_do_not_take_the_server_away(tmp_path: Path) -> None:
    with launched(tmp_path, TRAINING) as launcher:
        port = launcher.port
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert launcher.request("/ready")[0] in (200, 503)
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_worker_in_a_pod_answers_over_both_families(tmp_path: Path, address: str) -> None:
    need(address)
    with launched(tmp_path, TRAINING, http_host=None) as launcher:
        launcher.wait_for_ranks()
        assert launcher.request("/ready", address=address)[0] == 200


def test_a_local_run_answers_on_its_own_address_alone(tmp_path: Path) -> None:
    need("::1")
    with launched(tmp_path, TRAINING) as launcher:
        launcher.wait_for_ranks()
        with pytest.raises(ConnectionRefusedError):
            launcher.request("/ready", address="::1")


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL], ids=errno.errorcode.get)
def test_without_ipv6_all_addresses_are_those_of_ipv4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    kept = socket.socket

    def only_ipv4(family: int = socket.AF_INET, *others: int, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        return kept(family, *others, **named)

    monkeypatch.setattr(socket, "socket", only_ipv4)
    api = WorkerApi(
        rank_table=RankTable(spec_for(tmp_path, ranks=1), built_in_trainer=False),
        attempt=1,
        token=None,
        request_stop=lambda: None,
        collect_stacks=lambda: "",
        read_history=lambda: b"",
    )
    with WorkerHttpServer(None, 0, api) as server:
        assert server.host == "0.0.0.0"


def test_unknown_paths_and_methods_are_refused(tmp_path: Path) -> None:
    with launched(tmp_path, TRAINING) as launcher:
        status, body = launcher.request("/nothing")
        assert (status, "/stacks" in json.loads(body)["error"]) == (404, True)
        assert launcher.request("/progress", body=b"{}")[0] == 404
