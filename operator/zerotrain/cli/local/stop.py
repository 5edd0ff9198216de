"""Ctrl-C and SIGTERM during a local run: the first asks for a checkpoint, the second ends the ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from zerotrain.cli.local.attempt import Attempt


@dataclass(kw_only=True, slots=True)
class Stop:
    """Handling of Ctrl-C and SIGTERM: the first asks for a checkpoint, the second kills the attempt."""

    requested: threading.Event = field(default_factory=threading.Event)
    attempt: Attempt | None = None

    def request(self) -> None:
        again = self.requested.is_set()
        self.requested.set()
        if self.attempt is not None:
            if again:
                self.attempt.kill()
            else:
                self.attempt.stop()

    @contextmanager
    def ending(self, attempt: Attempt) -> Iterator[None]:
        """Pass requests to the attempt, and kill it at the end of the block if it still runs."""
        self.attempt = attempt
        if self.requested.is_set():  # the signal arrived while no attempt was running
            attempt.stop()
        try:
            yield
        finally:
            attempt.kill()
            self.attempt = None


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
