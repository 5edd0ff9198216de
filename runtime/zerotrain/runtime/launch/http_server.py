"""The HTTP server of the worker: small, threaded, and responsive also while a rank is stuck.

Every answer comes from the rank table; the one request that waits for ranks (`/stacks`) is bounded. The
paths and bodies are the contract's (`zerotrain.contract.worker_http`). `http_slots` decides which connections
are served when there are too many, and for how long.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.exposition import choose_encoder

from zerotrain.contract import channel_token
from zerotrain.contract.worker_http import (
    HISTORY_PATH,
    METRICS_PATH,
    PROGRESS_PATH,
    READY_PATH,
    STACKS_PATH,
    TOKEN_HEADER,
    YIELD_PATH,
    yield_attempt,
)
from zerotrain.runtime.launch.http_slots import Slots
from zerotrain.runtime.launch.library_status import LIBRARY_HEADER, MAX_STATUS_BYTES, STATUS_PATH
from zerotrain.runtime.launch.log import say
from zerotrain.runtime.launch.rank_table import RankTable

MAX_BODY_BYTES = 4096
SOCKET_TIMEOUT_S = 10.0
JSON = "application/json"
JSON_LINES = "application/x-ndjson"
TEXT = "text/plain; charset=utf-8"
ALL_IPV4, ALL_IPV6 = "0.0.0.0", "::"
NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerApi:
    """Interface of the launcher for the HTTP threads."""

    rank_table: RankTable
    attempt: int
    token: str | None
    """Channel token of the attempt. With None, in a local run, every POST is rejected and any client may read
    stacks."""
    request_stop: Callable[[], None]
    collect_stacks: Callable[[], str]
    """Blocks for at most a few seconds. Raises TimeoutError."""
    read_history: Callable[[], bytes]
    """Returns JSON lines, empty where this worker has none; reads from the checkpoint volume, so it may
    block."""
    status_token: str | None = None
    """Token with which a script's library posts its progress; None = it may not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response."""

    status: HTTPStatus
    body: bytes
    content_type: str = JSON


class WorkerHttpServer(ThreadingHTTPServer):
    """Serves `api` from daemon threads, as many as there are slots."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, host: str | None, port: int, api: WorkerApi, slots: Slots[socket.socket] | None = None
    ) -> None:
        """Bind at once; no host means all addresses of both families, port 0 takes a free one. Raises OSError
        when the address is not available."""
        host = _all_addresses() if host is None else host
        self.api = api
        self.slots: Slots[socket.socket] = Slots() if slots is None else slots
        self._reading = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def host(self) -> str:
        return str(self.server_address[0])

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="zerotrain-http", daemon=True).start()

    def history(self) -> Answer:
        """Return the history, for one request at a time: an unresponsive volume must not block all
        connections."""
        if not self._reading.acquire(blocking=False):
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "another request reads the history; try again")
        try:
            return Answer(status=HTTPStatus.OK, body=self.api.read_history(), content_type=JSON_LINES)
        finally:
            self._reading.release()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # A node may be configured (net.ipv6.bindv6only) to keep IPv4 from `::`.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind asks DNS for the host's full name, which may hang for seconds in a pod.
        super(ThreadingHTTPServer, self).server_bind()
        self.server_name, self.server_port = self.host, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        admission = self.slots.admit(request, str(client_address[0]), time.monotonic())
        if admission.displaced is not None:
            _hang_up(admission.displaced)
        if not admission.admitted:
            self.shutdown_request(request)  # a client that holds connections open must not use up threads
            return
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close overdue connections; the serving thread calls it between requests and twice a second."""
        for connection in self.slots.overdue(time.monotonic()):
            _hang_up(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception() if sys.version_info >= (3, 12) else sys.exc_info()[1]
        if not isinstance(error, OSError):  # a client that disconnected needs no log line
            say(f"HTTP request failed: {error!r}")


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads or writes on the connection; that thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _all_addresses() -> str:
    """Return `::`, which takes IPv4 too; `0.0.0.0` where the machine has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ALL_IPV6, 0))
    except OSError as error:
        if error.errno not in NO_IPV6:
            raise
        return ALL_IPV4
    return ALL_IPV6


class _Handler(BaseHTTPRequestHandler):
    server: WorkerHttpServer
    timeout = SOCKET_TIMEOUT_S
    server_version = "zerotrain"
    sys_version = ""

    def parse_request(self) -> bool:
        """Parse the head of a request; then start the time limit of the answer."""
        whole = super().parse_request()
        if whole:
            # The body of a POST is still to come, within the time of an answer.
            self.server.slots.request_came(self.request, time.monotonic(), trusted=self._is_operator())
        return whole

    def do_GET(self) -> None:
        api = self.server.api
        match urlsplit(self.path).path:
            case str(path) if path == METRICS_PATH:
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._send(
                    Answer(
                        status=HTTPStatus.OK,
                        body=encode(api.rank_table.registry()),
                        content_type=content_type,
                    )
                )
            case str(path) if path == PROGRESS_PATH:
                self._send(Answer(status=HTTPStatus.OK, body=api.rank_table.report().to_json().encode()))
            case str(path) if path == HISTORY_PATH:
                self._send(self.server.history())
            case str(path) if path == READY_PATH:
                self._send(_ready(api.rank_table))
            case str(path) if path == STACKS_PATH:
                self._send(self._stacks())
            case _:
                self._send(
                    _problem(
                        HTTPStatus.NOT_FOUND, "known are /metrics /progress /history /ready /stacks /yield"
                    )
                )

    def do_POST(self) -> None:
        # The client is authenticated before the body is read.
        match urlsplit(self.path).path:
            case str(path) if path == YIELD_PATH:
                self._send(self._refuse_stranger() or self._take(MAX_BODY_BYTES, self._yield))
            case str(path) if path == STATUS_PATH and self.server.api.status_token is not None:
                token, header = self.server.api.status_token, self.headers.get(LIBRARY_HEADER)
                self._send(_refuse_token(token, header) or self._take(MAX_STATUS_BYTES, self._library_status))
            case _:
                self._send(_problem(HTTPStatus.NOT_FOUND, f"POST knows {YIELD_PATH} alone"))

    def _refuse_stranger(self) -> Answer | None:
        return _refuse_token(self.server.api.token, self.headers.get(TOKEN_HEADER))

    def _is_operator(self) -> bool:
        token, header = self.server.api.token, self.headers.get(TOKEN_HEADER)
        if token is None or header is None:
            return False
        return any(_refuse_token(one, header) is None for one in (token, channel_token.for_reading(token)))

    def _stacks(self) -> Answer:
        # It interrupts every rank, so only the operator may do it.
        refusal = None if self.server.api.token is None else self._refuse_stranger()
        return refusal or _stacks(self.server.api)

    def _take(self, max_bytes: int, handle: Callable[[bytes], Answer]) -> Answer:
        """Return what `handle` answers to the body, or the refusal of one that it finds wrong (ValueError),
        that has no length or exceeds the limit."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            return _problem(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if not 0 < length <= max_bytes:
            return _problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has 1 to {max_bytes} bytes")
        body = self.rfile.read(length)
        try:
            return handle(body)
        except ValueError as error:
            return _problem(HTTPStatus.BAD_REQUEST, str(error))

    def _library_status(self, body: bytes) -> Answer:
        self.server.api.rank_table.library_progressed(body)
        return Answer(status=HTTPStatus.OK, body=b"{}")

    def _yield(self, body: bytes) -> Answer:
        attempt, api = yield_attempt(body), self.server.api
        if attempt != api.attempt:
            return _problem(HTTPStatus.CONFLICT, f"this is attempt {api.attempt}, not {attempt}")
        api.request_stop()
        return Answer(
            status=HTTPStatus.ACCEPTED, body=json.dumps({"attempt": attempt, "stopping": True}).encode()
        )

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        if answer.status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the container's log belongs to the ranks, and scrapes would fill it."""


def _ready(rank_table: RankTable) -> Answer:
    report = rank_table.report()
    status = HTTPStatus.OK if report.ready else HTTPStatus.SERVICE_UNAVAILABLE
    phases = {str(rank.rank): str(rank.phase) for rank in report.ranks}
    return Answer(status=status, body=json.dumps({"ready": report.ready, "phases": phases}).encode())


def _stacks(api: WorkerApi) -> Answer:
    try:
        return Answer(status=HTTPStatus.OK, body=api.collect_stacks().encode(), content_type=TEXT)
    except TimeoutError:
        return _problem(HTTPStatus.GATEWAY_TIMEOUT, "the ranks' stacks did not come in time")


def _refuse_token(expected: str | None, header: str | None) -> Answer | None:
    """Return None when the header has the expected token, else the error response."""
    scheme, _, shown = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not shown:
        return _problem(HTTPStatus.UNAUTHORIZED, f"this needs '{TOKEN_HEADER}: Bearer <channel token>'")
    if expected is None:
        return _problem(HTTPStatus.FORBIDDEN, "this worker was started without a token file")
    if not channel_token.matches(expected, shown.strip()):
        return _problem(HTTPStatus.FORBIDDEN, "the token is not this attempt's")
    return None


def _problem(status: HTTPStatus, text: str) -> Answer:
    return Answer(status=status, body=json.dumps({"error": text}).encode())
