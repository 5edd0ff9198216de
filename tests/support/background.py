"""Threads that an exception ended: whoever waits for what they should have done hears of it at once.

pytest fails the test, too, but only when it is over; until then it would wait for its patience to end.
"""

from __future__ import annotations

import threading
import traceback

_dead: list[str] = []


class ThreadDied(AssertionError):
    """A background thread of the running test ended by an exception; carries its traceback."""


def listen() -> None:
    """Hear of dead threads from now on, beside whoever hears of them already."""
    told = threading.excepthook

    def hear(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "gone"
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        _dead.append(f"thread {name}:\n{trace}")
        told(args)

    threading.excepthook = hear


def forget() -> None:
    """A new test begins."""
    _dead.clear()


def check(awaited: str) -> None:
    """Raises ThreadDied when a thread died since the test began."""
    if _dead:
        raise ThreadDied(f"while waiting for {awaited}: {_dead[0]}")
