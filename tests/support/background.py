"""Detection of background threads that ended with an exception.

Code that waits for the work of such a thread fails at once. pytest fails the test, too, but only after it
ends; until then the test would wait for its whole timeout.
"""

from __future__ import annotations

import threading
import traceback

_dead: list[str] = []


class ThreadDied(AssertionError):
    """A background thread of the running test ended with an exception; carries its traceback."""


def listen() -> None:
    """Record threads that end with an exception from now on, and still call the previous hook."""
    previous = threading.excepthook

    def record(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "gone"
        trace = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        _dead.append(f"thread {name}:\n{trace}")
        previous(args)

    threading.excepthook = record


def forget() -> None:
    """Forget the recorded threads; called when a new test begins."""
    _dead.clear()


def check(awaited: str) -> None:
    """Raise ThreadDied if a thread died since the test began."""
    if _dead:
        raise ThreadDied(f"while waiting for {awaited}: {_dead[0]}")
