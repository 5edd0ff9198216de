"""Workers that answer the operator's polls with anything that could harm it."""

from __future__ import annotations

import gzip
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.hostile.bodies import listed, nested_lists, nested_objects
from tests.cluster.hostile.texts import DIRT, filled
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT

Answer = Callable[[str, str], bytes]
"""Function from name and UID of the job to all bytes of the response."""

MOST_ADDRESSES = 1_000


def page(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/json", *headers]
    return ("\r\n".join(head) + "\r\n\r\n").encode("latin-1", errors="replace") + body


def report(ranks: list[Any] | None = None, **changes: Any) -> Answer:
    """Return a report of the right job with some false fields.

    Each rank's fields are added to a good record.
    """

    def answer(job: str, uid: str) -> bytes:
        now = time.time()
        record = {"rank": 0, "attempt": 1, "phase": "step", "step": 5, "heartbeat_at": now, "step_at": now}
        known = {"job": job, "job_uid": uid, "attempt": 1, "node_rank": 0, "world_size": 1, "ready": True}
        records = [{**record, **rank} if isinstance(rank, dict) else rank for rank in ranks or [{}]]
        return page(json.dumps({**known, "ranks": records, **changes}).encode())

    return answer


def plain(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    return lambda job, uid: page(body, *headers, status=status)


def bare(text: bytes) -> Answer:
    return lambda job, uid: text


LIARS: Mapping[str, Answer] = {
    "says-deep-lists": plain(nested_lists(300_000).encode()),
    "says-deep-objects": plain(nested_objects(900).encode()),
    "says-fat": plain(listed("{}", 8_000_000).encode()),
    "says-bomb": plain(gzip.compress(b" " * 200_000_000, 1), "Content-Encoding: gzip"),
    "says-many-ranks": report([{}] * 60_000),
    "says-no-json": plain(b"<html>\x1b[31m"),
    "says-no-text": plain(bytes(range(256)) * 100),
    "says-half-pairs": report([{"straggler": {"rank": 0, "own_seconds": "\ud800"}}], job="\ud800"),
    "says-other-job": report(job=DIRT, job_uid=DIRT),
    "says-types": report([{"step": {}, "phase": [], "loss": "x", "checkpoint": 5, "motion": []}]),
    "says-integers": report([{"step": 10**300, "total_steps": -(10**300)}]),
    "says-floats": report([{"loss": float("nan"), "grad_norm": float("inf"), "step_at": 1e308}]),
    "says-checkpoint": report([{"checkpoint": {"step": 3, "path": f"/c/{DIRT}", "time": 1e300}}]),
    "says-rejected": report([{"rejected_checkpoints": [{"path": f"/c/{DIRT}", "reason": DIRT}] * 1000}]),
    "says-long": report([{"rejected_checkpoints": [{"path": filled(DIRT, 400_000), "reason": "x"}]}]),
    "says-unfinished": report([{"rejected_checkpoints": [{"path": "/c", "reason": "\x9d" * 8000}] * 20}]),
    "says-lists": report(job=[[]] * 200_000),
    "says-resumed": report([{"resumed_from": 10**18, "phase": DIRT}]),
    "says-backwards": report([{"step": -5, "attempt": -1, "rank": -7}]),
    "sends-elsewhere": plain(b"", "Location: http://169.254.169.254/latest", status="307 Temporary Redirect"),
    "sends-dirty-status": plain(b"{}", status=f"500 {DIRT.replace(chr(13), '').replace(chr(10), '')}"),
    "sends-headers": plain(b"{}", *(f"X-{number}: {'x' * 4000}" for number in range(500))),
    "sends-no-http": bare(b"\x00\x01\x02" * 1000),
    "sends-nothing": bare(b""),
    "sends-half": bare(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{"),
}  # fmt: skip
"""Answers by name, which is also the job's name."""


@dataclass
class Liar:
    """A server on its own loopback address that gives the same answer to every request and counts them."""

    answer: bytes
    address: str = ""
    asked: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        listener = _listen()
        self.address = str(listener.getsockname()[0])
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _serve(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        with listener:
            while not self._stop.is_set():
                try:
                    caller, _ = listener.accept()
                except TimeoutError:
                    continue
                threading.Thread(target=self._say, args=(caller,), daemon=True).start()

    def _say(self, caller: socket.socket) -> None:
        with caller:
            caller.settimeout(30)
            try:
                if caller.recv(65_536):
                    self.asked += 1
                    caller.sendall(self.answer)
            except OSError:
                return  # the client closed the connection


def _listen() -> socket.socket:
    first = secrets.randbelow(100 * 256 * 250)
    for number in itertools.islice(itertools.count(first), MOST_ADDRESSES):
        network, host = divmod(number % (100 * 256 * 250), 250)
        address = f"127.{100 + network // 256}.{network % 256}.{host + 1}"
        try:
            return socket.create_server((address, WORKER_HTTP_PORT))
        except OSError:
            continue
    raise RuntimeError(f"port {WORKER_HTTP_PORT} of {MOST_ADDRESSES} loopback addresses in a row is taken")
