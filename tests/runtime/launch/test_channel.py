"""The rank's channel never blocks or breaks a training loop, and the launcher trusts no message."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.launcher import eventually, launched
from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.worker_environment import RankEnv
from zerotrain.runtime.channel import MAX_MESSAGE_BYTES, ChannelTiming, RankChannel

pytestmark = pytest.mark.ranks


QUICK = ChannelTiming(heartbeat_interval_s=0.05, retry_s=0.02, send_timeout_s=0.2, flush_timeout_s=0.2)


def progress(step: int) -> Progress:
    return Progress(rank=0, attempt=1, phase=Phase.STEP, step=step)


def is_whole(line: bytes) -> bool:
    """Return whether a line is complete: a rank that stops may leave half of its last message."""
    return line.endswith(b"\n")


class Listener:
    """Collector of the lines that a rank sends."""

    def __init__(self, path: Path) -> None:
        self.messages: list[dict[str, object]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def steps(self) -> list[int]:
        return [m["progress"]["step"] for m in self.messages if m["kind"] == "progress"]  # type: ignore[index]

    def _run(self) -> None:
        connection, _ = self._socket.accept()
        with connection.makefile("rb") as lines:
            for line in filter(is_whole, lines):
                self.messages.append(json.loads(line))


def test_without_a_launcher_everything_is_a_no_op() -> None:
    channel = RankChannel.from_env({})
    channel.publish(progress(1))
    channel.publish_metrics()
    channel.failure(ValueError("x"))
    channel.close()
    assert not channel.connected


def test_absent_launcher_costs_the_loop_nothing(tmp_path: Path) -> None:
    """Publishing 10,000 times without a listener never waits for the next try or for a send.

    These take a day here.
    """
    timing = replace(QUICK, retry_s=86_400.0, send_timeout_s=86_400.0)
    channel = RankChannel(tmp_path / "nobody.sock", timing=timing)
    before = threading.active_count()
    for step in range(10_000):
        channel.publish(progress(step))
    assert threading.active_count() <= before + 1
    channel.close()


def test_launcher_that_does_not_read_gets_the_newest_record_later(tmp_path: Path) -> None:
    """The kernel's buffer fills; older records are dropped, the last one arrives."""
    path = tmp_path / "c.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    channel = RankChannel(path, timing=QUICK)
    for step in range(5_000):
        channel.publish(progress(step))
        if step % 50 == 0:
            time.sleep(0.001)
    received: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            connection, _ = server.accept()
            with connection.makefile("rb") as lines:
                for line in filter(is_whole, lines):
                    message = json.loads(line)
                    if message["kind"] == "progress":
                        received.append(message["progress"]["step"])

    threading.Thread(target=read, daemon=True).start()
    eventually(lambda: received and received[-1] == 4_999)
    stop.set()
    assert received == sorted(received)
    channel.close()


def test_launcher_that_comes_late_or_again_is_found(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    channel = RankChannel(path, rank=4, timing=QUICK)
    channel.publish(progress(7))
    channel.failure(ValueError("kept until somebody listens"))
    listener = Listener(path)
    eventually(lambda: listener.steps())
    eventually(lambda: any(m["kind"] == "failure" for m in listener.messages))
    assert listener.messages[0]["kind"] == "hello"
    assert listener.messages[0]["rank"] == 4
    assert listener.steps()[0] == 7
    channel.close()


def test_silence_is_filled_with_heartbeats(tmp_path: Path) -> None:
    now = [100.0]
    listener = Listener(tmp_path / "c.sock")
    channel = RankChannel(tmp_path / "c.sock", timing=QUICK, clock=lambda: now[0])
    channel.publish(progress(1))
    eventually(lambda: listener.steps())
    now[0] = 200.0
    eventually(
        lambda: listener.messages[-1]["progress"]["heartbeat_at"] == 200.0  # type: ignore[index]
    )
    assert set(listener.steps()) == {1}
    channel.close()


def test_failure_is_delivered_before_the_call_returns(tmp_path: Path) -> None:
    """The rank ends right after it with os._exit; only what the kernel holds by then arrives."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "c.sock"))
    server.listen()

    def slow_clock() -> float:
        time.sleep(0.3)  # the thread still sends the progress when the failure comes
        return 1.0

    channel = RankChannel(tmp_path / "c.sock", timing=ChannelTiming(), clock=slow_clock)
    channel.publish(progress(1))
    channel.failure(KeyError("x" * 100_000))
    server.setblocking(False)
    connection, _ = server.accept()
    connection.setblocking(False)
    lines = [json.loads(line) for line in connection.recv(1 << 20).splitlines()]
    text = next(str(message["text"]) for message in lines if message["kind"] == "failure")
    assert text.startswith("KeyError: 'xxx")
    assert len(text) <= 4000
    connection.close()
    channel.close()


def test_a_record_that_has_to_be_sent_again_goes_before_the_failure_that_followed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reverse order would look like a rank that continues."""
    sent, breaks = list[str](), [True, False, False]

    def deliver(kind: str, value: object) -> bool:
        if breaks.pop(0):
            return False
        sent.append(kind)
        return True

    sender = RankChannel(tmp_path / "c.sock", timing=QUICK)._sender
    assert sender is not None
    monkeypatch.setattr(sender, "_deliver", deliver)
    sender.put("failure", "ValueError: x")
    sender.put("progress", progress(2))
    for _ in range(2):
        batch = sender._take()
        assert batch is not None
        sender._send(batch)
    assert sent == ["progress", "failure"]


def test_environment_of_the_rank_is_read_through_the_contract(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "c.sock")
    env = RankEnv(rank=2, local_rank=0, local_world_size=1, channel_socket=tmp_path / "c.sock")
    channel = RankChannel.from_env(env.to_env())
    channel.publish(progress(1))
    eventually(lambda: listener.steps())
    assert listener.messages[0]["rank"] == 2
    channel.close()


def test_launcher_survives_what_a_rank_may_send(tmp_path: Path) -> None:
    """Garbage, false ranks or attempts, endless lines: the connection ends, the next one works."""
    text = r"""
    import json, socket
    path = os.environ["ZEROTRAIN_CHANNEL_SOCKET"]
    def send(*lines):
        s = socket.socket(socket.AF_UNIX)
        s.connect(path)
        try:
            for line in lines:
                s.sendall(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        except OSError:
            pass
        s.close()
    hello = {"kind": "hello", "rank": RANK}
    good = json.loads(Progress(rank=RANK, attempt=ATTEMPT, step=1).to_json())
    send(b"garbage\n")
    send([1, 2])
    send({"kind": "progress", "progress": good})
    send({"kind": "hello", "rank": 99})
    send({"kind": "hello", "rank": "0"})
    send(hello, {"kind": "progress", "progress": good | {"attempt": 2, "step": 66}})
    send(hello, {"kind": "progress", "progress": good | {"rank": 1, "step": 77}})
    send(hello, {"kind": "progress", "progress": {"step": "far"}})
    send(hello, {"kind": "metrics", "families": [{"name": "x y", "help": "", "type": "gauge", "unit": ""}]})
    send(hello, {"kind": "progress", "progress": good | {"step": "far"}})
    send(hello, {"kind": "progress", "progress": good | {"checkpoint": {"step": "x", "path": "", "time": 1}}})
    send(hello, {"kind": "progress", "progress": good | {"checkpoint": 7}})
    send(hello, {"kind": "metrics", "families": "none"})
    send(hello, b"[" * 200_000 + b"\n")
    send(hello, b"x" * TOO_MANY)
    send(hello, b'{"kind": "progr')
    channel = RankChannel.from_env()
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=5))
    time.sleep(600)
    """.replace("TOO_MANY", str(2 * MAX_MESSAGE_BYTES))
    with launched(tmp_path, text, ranks=1) as launcher:
        eventually(lambda: launcher.report()["ranks"][0]["step"] == 5)
        assert launcher.request("/metrics")[0] == 200
        launcher.popen.terminate()
        code, output = launcher.finish()
    assert code == 143
    assert output.count("refused") == 15
