"""A stop of an event loop at one chosen await point: nothing after it happens, as after SIGKILL.

`Gate.tasks` is a task factory. Every coroutine of the loop runs inside a `Watched` one that reports each of
its suspensions; once the gate is shut no coroutine of the loop is ever resumed. Used by `operator_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

OPERATOR = "/zerotrain/operator/"
IDLE = "controller/work_queue.py:"
"""The place at which a worker waits between two passes."""

PLUMBING = frozenset({"cluster/api.py", "cluster/limits.py", "cluster/connection.py"})
"""Files of the client through which every request passes."""

MAX_FINALLY = 10
"""Largest number of awaits in the `finally` blocks of one coroutine; each of them refuses to close once."""

_in_pass: ContextVar[bool] = ContextVar("in_pass", default=False)
"""True in the tasks that take keys from the queue, and in all tasks that they start."""

is_closing: ContextVar[bool] = ContextVar("is_closing", default=False)
"""True in a thread that unwinds a dead loop's coroutines: their log messages then are not the operator's."""


class Gate:
    """The gate of one event loop.

    `suspended(place, in_pass)` is called at each await point; the gate shuts if it returns True.
    """

    def __init__(self, suspended: Callable[[str, bool], bool], closed: Callable[[], None]) -> None:
        self._suspended, self._closed = suspended, closed
        self._living: set[Watched] = set()
        self.shut = False

    def tasks(self, loop: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> asyncio.Task[Any]:
        watched = Watched(coroutine, self)
        self._living.add(watched)
        return asyncio.Task(watched, loop=loop, **options)

    def ended(self, watched: Watched) -> None:
        self._living.discard(watched)

    def close_coroutines(self) -> None:
        """Unwind suspended coroutines while no loop runs.

        Otherwise the garbage collector would do it at any moment in the middle of another loop, where a
        `finally` that awaits would do the dead loop's work.
        """
        token = is_closing.set(True)
        for watched in self._living:
            for _ in range(MAX_FINALLY):
                try:
                    watched.close()
                    break
                except Exception:
                    continue
        self._living.clear()
        is_closing.reset(token)

    def close(self) -> None:
        """Shut the gate: no coroutine of the loop takes another step."""
        self.shut = True
        self._closed()

    def passed(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        place = place_of(coroutine)
        if place is None or self.shut:
            return
        working = _in_pass.get() and not place.startswith(IDLE)
        if self._suspended(place, working):
            self.close()


class Watched(Coroutine[Any, Any, Any]):
    """A coroutine that reports each of its suspensions."""

    def __init__(self, inner: Coroutine[Any, Any, Any], gate: Gate) -> None:
        self._inner, self._gate = inner, gate
        self._works = _name_of(inner) == "Controller._take_keys"

    def send(self, value: Any, /) -> Any:
        if self._gate.shut:
            return _never()
        if self._works:
            _in_pass.set(True)  # tasks copy the context of the task that starts them
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        if self._gate.shut:
            return _never()
        return self._step(self._inner.throw, *error)

    def _step(self, resume: Callable[..., Any], *given: Any) -> Any:
        try:
            found = resume(*given)
        except BaseException:
            self._gate.ended(self)
            raise
        self._gate.passed(self._inner)
        return found

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return (yield from self._inner.__await__())


def place_of(coroutine: Any) -> str | None:
    """Return `file:function:line` of the operator's innermost waiting frame; None outside of the operator.

    Every request waits in the same lines of the client: for these the result names the caller, and which of
    the lines.
    """
    place, plumbing = None, ""
    while coroutine is not None:
        frame, following = _step(coroutine)
        if frame is not None:
            file = frame.f_code.co_filename.replace("\\", "/")
            if OPERATOR in file:
                module, name = file.rsplit(OPERATOR, 1)[1], frame.f_code.co_qualname
                if module in PLUMBING and place is not None:
                    plumbing = f" in {name}"
                else:
                    place = f"{module}:{name}:{frame.f_lineno}"
        coroutine = following
    return None if place is None else place + plumbing


def _step(coroutine: Any) -> tuple[Any, Any]:
    """Return the frame of a coroutine, generator or asynchronous generator, and what it waits for."""
    if isinstance(coroutine, Watched):
        return None, coroutine._inner
    for frame, following in (
        ("cr_frame", "cr_await"),
        ("gi_frame", "gi_yieldfrom"),
        ("ag_frame", "ag_await"),
    ):
        if hasattr(coroutine, frame):
            return getattr(coroutine, frame), getattr(coroutine, following)
    return None, None


def _name_of(coroutine: Any) -> str:
    return str(getattr(coroutine, "__qualname__", ""))


def _never() -> Any:
    """Return something to await that never completes."""
    return next(asyncio.get_running_loop().create_future().__await__())
