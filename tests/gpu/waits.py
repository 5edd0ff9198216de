"""Places where the host waits for a GPU in a step, as file:line < its caller.

torch's debug mode reports operations that wait (`item`, a copy into pageable memory), but no wait for an
event and none for the whole device. Those are counted here, apart from waits for what had passed already.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

PASSING_ON = (f"{Path(torch.__file__).parent}/", warnings.__file__, __file__)
"""Beginnings of file names whose frames only pass a wait on."""
FRAMES = 2
REPORT = "called a synchronizing CUDA operation"


@dataclass(slots=True)
class Waits:
    """Waits of a step by place."""

    real: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    """Waits for what the device had done by then."""
    is_asked: bool = False
    """Whether a wait that is counted already is running, and may be reported, too."""

    def count(self, *, is_over: bool) -> None:
        """Count a wait of the code that called."""
        (self.passed if is_over else self.real)[_place(sys._getframe(1))] += 1


def host_waits(step: Callable[[], object]) -> Waits:
    """Run a step and return its waits, those of other threads with the thread's name."""
    waits, cuda = Waits(), _untyped(torch.cuda)
    with warnings.catch_warnings(), _asked_for(waits):
        warnings.simplefilter("always")
        warnings.showwarning = _reporter(waits)
        cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            cuda.set_sync_debug_mode("default")
    return waits


def _reporter(waits: Waits) -> Callable[..., None]:
    def report(message: Warning | str, *_: Any, **__: Any) -> None:
        if REPORT in str(message) and not waits.is_asked:
            waits.count(is_over=False)

    return report


@contextmanager
def _asked_for(waits: Waits) -> Iterator[None]:
    """Count the waits for events, streams and the device."""
    cuda = _untyped(torch.cuda)
    with (
        patch.object(cuda.Event, "synchronize", _counting(cuda.Event.synchronize, waits)),
        patch.object(cuda.Stream, "synchronize", _counting(cuda.Stream.synchronize, waits)),
        patch.object(cuda, "synchronize", _counting(cuda.synchronize, waits)),
    ):
        yield


def _counting(wait: Callable[..., None], waits: Waits) -> Callable[..., None]:
    def counted(*args: Any, **kwargs: Any) -> None:
        query = getattr(args[0], "query", None) if args else None  # an event or a stream
        waits.count(is_over=query is not None and query())
        waits.is_asked = True
        try:
            wait(*args, **kwargs)
        finally:
            waits.is_asked = False

    return counted


def _place(frame: FrameType | None) -> str:
    """Return the innermost lines that do more than pass the wait on, and the thread if it is not the main
    one."""
    thread = threading.current_thread()
    lines = " < ".join(islice(_lines(frame), FRAMES))
    return lines if thread is threading.main_thread() else f"{lines} ({thread.name})"


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(PASSING_ON):
            yield f"{name.split('zerotrain/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back


def _untyped(module: Any) -> Any:
    return module
