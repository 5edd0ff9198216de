"""Passes a rank's output on to the launcher's own; keeps its last lines for the termination message."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import IO

CHUNK_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024
"""A longer line (a program that never writes a newline) is passed on in pieces."""
KEPT_LINES = 50
KEPT_LINE_CHARS = 2000


class OutputPump(threading.Thread):
    """Rank 0's bytes go through as they are (progress bars stay intact), other ranks' lines get a prefix.

    A thread per rank: a reader of the container's log that stalls must not stall the supervision.
    """

    def __init__(self, rank: int, source: IO[bytes], sink: IO[bytes], lock: threading.Lock) -> None:
        """`lock` is shared by all pumps that write to `sink`, so that lines do not mix."""
        super().__init__(name=f"zerotrain-output-{rank}", daemon=True)
        self._rank = rank
        self._source = source
        self._sink = sink
        self._lock = lock
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
            while chunk := os.read(self._source.fileno(), CHUNK_BYTES):
                lines = self._complete_lines(chunk)
                self._write(chunk if self._rank == 0 else self._prefixed(lines))
        rest, self._partial = self._partial, b""
        self._keep([rest])
        if rest:
            self._write(b"\n" if self._rank == 0 else self._prefixed([rest]))

    def _complete_lines(self, chunk: bytes) -> list[bytes]:
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._keep(lines)
        return lines

    def _keep(self, lines: list[bytes]) -> None:
        for line in lines:
            # What a terminal would show last: a progress bar rewrites its line after each carriage return.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").strip()
            if text:
                self._kept.append(text[:KEPT_LINE_CHARS])

    def _prefixed(self, lines: list[bytes]) -> bytes:
        prefix = f"[rank {self._rank}] ".encode()
        return b"".join(prefix + line + b"\n" for line in lines)

    def _write(self, data: bytes) -> None:
        with self._lock:
            try:
                self._sink.write(data)
                self._sink.flush()
            except OSError:
                return  # nobody reads any more; the rank must not die of it
