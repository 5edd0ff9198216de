"""The rank's end of the channel to its launcher: progress, metric snapshots, the reason of a failure.

The trainer or a user's script (`ProgressReporter`) publishes; a daemon thread sends. Publishing never blocks
and never raises: a newer record replaces one that was not sent yet, and a launcher that is slow, restarting
or absent costs records, not steps. The thread repeats the last progress as a heartbeat, so that the operator
can distinguish a live process from one whose steps advance.

Wire format: one JSON object per line over a Unix stream socket, at most MAX_MESSAGE_BYTES each. The first
message names the rank and the channel; a rank that failed and tries again opens another channel.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zerotrain.contract.progress import Progress
from zerotrain.contract.strict_json import own_json
from zerotrain.contract.worker_environment import RankEnv

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_MESSAGE_BYTES = 1 << 20
"""Largest message in bytes. The metrics of a rank take about 50 KB; a larger message is dropped."""

MAX_EXCEPTION_CHARS = 4000

_numbers = itertools.count(1)
"""Numbers of the channels of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelTiming:
    """Intervals and timeouts of the sender thread."""

    heartbeat_interval_s: float = 5.0
    """Silence after which the last progress is sent again."""
    retry_s: float = 1.0
    """Pause between two attempts to reach the launcher."""
    send_timeout_s: float = 1.0
    flush_timeout_s: float = 2.0
    """Time that `failure` and `close` wait until the thread has sent all pending messages."""


class RankChannel:
    """Publishes the records of one rank; does nothing where no launcher is.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        socket_path: Path | None,
        *,
        rank: int = 0,
        timing: ChannelTiming | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns Unix seconds for the heartbeat."""
        self._sender = (
            None if socket_path is None else _Sender(socket_path, rank, timing or ChannelTiming(), clock)
        )
        if self._sender is not None:
            self._sender.start()
            atexit.register(self.close)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RankChannel:
        """Return the channel of this rank; also make SIGUSR1 dump this process's stacks for `GET /stacks`."""
        env = RankEnv.from_env(environ)
        if env.stacks_path is not None:
            dump_stacks_on_signal(env.stacks_path)
        return cls(env.channel_socket, rank=env.rank)

    @property
    def connected(self) -> bool:
        """Whether the last message reached the launcher."""
        return self._sender is not None and self._sender.connected

    def attach_metrics(self, registry: CollectorRegistry) -> None:
        """Set the registry whose snapshot `publish_metrics` sends."""
        if self._sender is not None:
            self._sender.registry = registry

    def attach_wait(self, seconds: Callable[[], float | None]) -> None:
        """Set the function that returns how long this rank has waited in a collective. The sender thread
        calls it at every record and heartbeat."""
        if self._sender is not None:
            self._sender.collective_wait = seconds

    def publish(self, progress: Progress) -> None:
        """Hand over the newest record; an older unsent one is dropped."""
        if self._sender is not None:
            self._sender.put("progress", progress)

    def publish_metrics(self) -> None:
        """Request a snapshot of the attached registry; the sender thread takes and serialises it."""
        if self._sender is not None and self._sender.registry is not None:
            self._sender.put("metrics", self._sender.registry)

    def failure(self, exception: BaseException) -> None:
        """Send the reason why this rank is about to end; wait, for a bounded time, until the launcher has
        it."""
        if self._sender is not None:
            text = f"{type(exception).__name__}: {exception}".strip()[:MAX_EXCEPTION_CHARS]
            self._sender.put("failure", text)
            self._sender.flush()

    def close(self) -> None:
        """Send what is pending, within a bounded time, and end the thread. Idempotent."""
        if self._sender is not None:
            self._sender.close()


def dump_stacks_on_signal(path: Path) -> None:
    """Make SIGUSR1 append the stacks of all threads to `path`, also while a collective blocks.

    The signal wakes a dedicated thread, which dumps the stacks while it holds the interpreter's lock: a dump
    of running threads from within a signal handler can end the process with SIGSEGV. SIGUSR2 dumps from the
    handler nevertheless, for a program that does not release the lock; the launcher sends it where SIGUSR1
    had no effect. Call this function in the main thread, before others start: they inherit the mask that
    blocks SIGUSR1.
    """
    file: IO[str] = path.open("a")  # stays open for the life of the process: the C handler writes to its fd
    # SIGUSR1 has the handler, too, for a thread that started earlier and receives the signal.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        faulthandler.register(number, file=file, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=_dump_when_asked, args=(file,), name="zerotrain-stacks", daemon=True).start()


def _dump_when_asked(file: IO[str]) -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        faulthandler.dump_traceback(file, all_threads=True)


class _Sender:
    """The sender thread, its socket, and one slot per kind of message."""

    def __init__(self, path: Path, rank: int, timing: ChannelTiming, clock: Callable[[], float]) -> None:
        self.registry: CollectorRegistry | None = None
        self.collective_wait: Callable[[], float | None] = lambda: None
        """Returns None where the program does not measure collectives."""
        self._path = str(path)
        self._hello = {"kind": "hello", "rank": rank, "channel": next(_numbers)}
        self._timing = timing
        self._clock = clock
        self._changed = threading.Condition()
        self._slots: dict[str, Any] = {}
        self._last_progress: Progress | None = None
        self._in_flight = False
        self._closing = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="zerotrain-channel", daemon=True)

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def start(self) -> None:
        self._thread.start()

    def put(self, kind: str, value: Any) -> None:
        with self._changed:
            self._slots[kind] = value
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._slots and not self._in_flight, timeout=self._timing.flush_timeout_s
            )

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._timing.send_timeout_s)

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            unsent = self._send(batch)
            with self._changed:
                self._in_flight = False
                self._changed.notify_all()
                if unsent and not self._closing:
                    self._changed.wait_for(lambda: self._closing, timeout=self._timing.retry_s)
        self._disconnect()

    def _send(self, batch: dict[str, Any]) -> bool:
        """Send the messages in order; return whether one is left. Later messages wait behind an unsent one: a
        progress record that came after the failure message would revoke it."""
        left = list(batch.items())
        while left and self._deliver(*left[0]):
            left.pop(0)
        with self._changed:
            for kind, value in left:  # unless a newer one has taken its slot
                self._slots.setdefault(kind, value)
        return bool(left)

    def _take(self) -> dict[str, Any] | None:
        """Return the pending messages, or a heartbeat after a silence; None when closing."""
        with self._changed:
            self._changed.wait_for(
                lambda: bool(self._slots) or self._closing, timeout=self._timing.heartbeat_interval_s
            )
            if self._closing:
                return None
            batch, self._slots = self._slots, {}
            if self._last_progress is not None:
                batch.setdefault("progress", self._last_progress)  # every message is a heartbeat too
            self._in_flight = bool(batch)
            return dict(sorted(batch.items(), key=lambda item: item[0] == "failure"))

    def _deliver(self, kind: str, value: Any) -> bool:
        """Send one message; return whether it was sent or dropped for good."""
        try:
            message = self._encode(kind, value)
        except Exception as error:
            # A collector of the user's may raise; that must not break the rank's channel.
            message = _line({"kind": "note", "text": f"{kind} not sent: {error}"[:500]})
        if len(message) > MAX_MESSAGE_BYTES:
            return True
        try:
            self._connection().sendall(message)
        except OSError:
            self._disconnect()
            return False
        return True

    def _encode(self, kind: str, value: Any) -> bytes:
        if kind == "progress":
            self._last_progress = replace(
                value, heartbeat_at=self._clock(), collective_wait_seconds=self.collective_wait()
            )
            return _line({"kind": kind, "progress": own_json(self._last_progress.to_json())})
        if kind == "metrics":
            # Imported late: a script without metrics does not need prometheus_client.
            from zerotrain.runtime.metrics.snapshot import snapshot

            return _line({"kind": kind, "families": snapshot(value)})
        return _line({"kind": kind, "text": value})

    def _connection(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(self._timing.send_timeout_s)
            try:
                connection.connect(self._path)
                connection.sendall(_line({**self._hello, "pid": os.getpid()}))
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
