"""Copies a rank's output to the launcher's own; keeps its last lines for the termination message."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO

CHUNK_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024
"""Longest line that is kept whole; a longer one (of a program that writes no newline) is copied in pieces."""
LINE_WAIT_S = 0.1
"""Time that rank 0 has to finish its line before another rank's is put after its beginning."""
KEPT_LINES = 50
KEPT_LINE_CHARS = 2000


class Sink:
    """The launcher's own output, shared by the pumps of all ranks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._within_line = False

    def write_raw(self, data: bytes) -> None:
        """Write bytes unchanged; they may end within a line."""
        with self._lock:
            self._write(data)

    def write_lines(self, data: bytes) -> None:
        """Write whole lines, after a newline if rank 0 has left its line unfinished (a progress bar)."""
        with self._lock:
            self._write(b"\n" + data if self._within_line and data else data)

    def finish_line(self) -> None:
        with self._lock:
            if self._within_line:
                self._write(b"\n")

    def _write(self, data: bytes) -> None:
        if not data:
            return
        self._within_line = not data.endswith(b"\n")
        with suppress(OSError):  # no reader any more; the ranks must not fail for that
            self._stream.write(data)
            self._stream.flush()


class OutputPump(threading.Thread):
    """Copies rank 0's bytes unchanged (progress bars stay intact), and other ranks' lines with a prefix.

    Each rank has a thread: a stalled reader of the container's log must not stall the supervision.
    """

    def __init__(self, rank: int, source: IO[bytes], sink: Sink) -> None:
        super().__init__(name=f"zerotrain-output-{rank}", daemon=True)
        self._rank = rank
        self._source = source
        self._sink = sink
        self._partial = b""
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last non-empty lines, oldest first."""
        return tuple(self._kept)

    @property
    def last_line(self) -> str | None:
        return self._kept[-1] if self._kept else None

    def run(self) -> None:
        with self._source:
            while chunk := self._read():
                lines = self._complete_lines(chunk)
                if self._rank == 0:
                    self._sink.write_raw(chunk)
                else:
                    self._sink.write_lines(self._prefixed(lines))
        rest, self._partial = self._partial, b""
        self._keep([rest])
        if self._rank == 0:
            self._sink.finish_line()
        elif rest:
            self._sink.write_lines(self._prefixed([rest]))

    def _read(self) -> bytes:
        """Return what the rank wrote; nothing at its end.

        Where output has no buffer, `print` writes a line in pieces. Those of rank 0, whose bytes are copied
        unchanged, are put together here, so that other ranks' lines do not come between them.
        """
        descriptor = self._source.fileno()
        data = piece = os.read(descriptor, CHUNK_BYTES)
        if self._rank != 0:
            return data
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + LINE_WAIT_S
        while piece and not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                break
            data += (piece := os.read(descriptor, CHUNK_BYTES))
        return data

    def _complete_lines(self, chunk: bytes) -> list[bytes]:
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._keep(lines)
        return lines

    def _keep(self, lines: list[bytes]) -> None:
        for line in lines:
            # The text that a terminal would show last: a progress bar rewrites its line after each carriage
            # return.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").strip()
            if text:
                self._kept.append(text[:KEPT_LINE_CHARS])

    def _prefixed(self, lines: list[bytes]) -> bytes:
        prefix = f"[rank {self._rank}] ".encode()
        return b"".join(prefix + line + b"\n" for line in lines)
