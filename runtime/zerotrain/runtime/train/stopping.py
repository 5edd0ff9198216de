"""Handling of SIGTERM up to a common last step, and the fallback where no step boundary comes in time.

Python runs signal handlers in the main thread, which may be blocked in a collective as long as a peer is
gone. So the C-level handler writes the signal's number to a socket (`set_wakeup_fd`) and a thread reads it at
once: it passes the request to the engine, whose step record tells all ranks, and ends the process with
TERMINATED when no step boundary came within the grace period.

A forked child inherits handler and socket: its own SIGTERM would stop the job and leave the child alive. So
forked children get the default handler of the signal back (`_forgotten_by_forks`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache

from zerotrain.contract.exit_codes import ExitCode

GRACE_MARGIN = 0.95
"""Fraction of the grace period after which the process ends itself, before SIGKILL hides the reason."""


class StopRequest:
    """SIGTERM as a request. Make it in the main thread; `set_callback` may follow later."""

    def __init__(self, *, grace_seconds: float, end: Callable[[int], object] = os._exit) -> None:
        """`end` ends the process with a code; it is an argument for tests."""
        self._grace_seconds = grace_seconds * GRACE_MARGIN
        self._end = end
        self._requested = threading.Event()
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._on_request: Callable[[], object] | None = None
        self._receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._sender = sender
        _forgotten_by_forks()
        _wakeup_fds.add(sender.fileno())
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _wake)
        self._thread = threading.Thread(target=self._watch, name="zerotrain-stop", daemon=True)
        self._thread.start()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested.is_set()

    def set_callback(self, on_request: Callable[[], object]) -> None:
        """Call `on_request` (from any thread) when the request comes, or now if it has come."""
        with self._lock:
            self._on_request = on_request
            if self.requested:
                on_request()

    def finished(self) -> None:
        """Record that the process is about to end by itself: the grace period no longer applies."""
        self._finished.set()

    def _watch(self) -> None:
        while data := self._receiver.recv(64):
            if signal.SIGTERM in data:
                break
        else:
            return
        print("stop requested: this rank stops with all others after the step in progress", flush=True)
        with self._lock:
            self._requested.set()
            if self._on_request is not None:
                self._on_request()
        if not self._finished.wait(self._grace_seconds):
            print(
                f"no step boundary and checkpoint within {self._grace_seconds:.0f} s of SIGTERM; "
                "raise checkpoint.gracePeriodSeconds above one step plus one checkpoint",
                file=sys.stderr,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._end(int(ExitCode.TERMINATED))


_wakeup_fds: set[int] = set()
"""Descriptors that the C-level handler of this process writes to, or wrote to earlier."""

_held_back = threading.local()
"""`mask`: the signal mask of a thread that forks."""


def _wake(number: int, frame: object) -> None:
    """Do nothing; without a handler the signal would end the process."""


@cache
def _forgotten_by_forks() -> None:
    """Make children that this process forks end on SIGTERM as any other process does."""
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget)


def _hold_back() -> None:
    # A child may receive the signal as soon as it exists, while it still has the parent's handler.
    _held_back.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held_back.mask)


def _forget() -> None:
    if signal.getsignal(signal.SIGTERM) is _wake:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sender = signal.set_wakeup_fd(-1)
    if sender not in _wakeup_fds:  # another library's descriptor
        signal.set_wakeup_fd(sender)
    _let_through()
