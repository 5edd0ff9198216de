"""Enforcement of the unit tier: no process, no socket, and at most a second of its own, on a fast core.

Python reports processes and sockets to audit hooks before it creates them, so the call itself fails, with its
place in the traceback. A test that swallows this error fails at its end. Actions of native code are not seen.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.device import DEVICE
from tests.support.tiers import tier_of

LIMIT_S = 1.0 if DEVICE == "cpu" else 30.0
"""Longest time of a unit test. A GPU starts in whichever test of a process uses it first."""

QUIET_SHARE = 0.1
"""Share of a test's wall clock; with fewer stalls, the wall clock counts as the test's own time."""

BUSY_FACTOR = 2.0
"""Factor by which work may take more processor time when caches and cores are shared with other processes."""

FAST_LOOP_S = 0.022
"""Processor time of `_loop` on a core of a 2.5 GHz Xeon that no other virtual machine shares."""

FORBIDDEN = {
    **dict.fromkeys(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.system", "os.exec", "os.spawn", "pty.spawn"), "starts a process"),
    **dict.fromkeys(("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg"), "opens a socket"),
}
"""Texts that say what a test does, by audit event. Socket pairs are missing: every event loop has one."""

_WAY_OUT = "Mark it `ranks` if it needs that (CONTRIBUTING.md, tiers), or check the property without"


class NotUnit(AssertionError):
    """A unit test does something that only a more expensive tier may do."""


class _Watch:
    """The forbidden actions of one test. Threads that existed before the test do not count."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def see(self, event: str, subject: object) -> None:
        if threading.get_ident() in self._others:
            return
        self.acts.append(f"{FORBIDDEN[event]} ({event}: {str(subject)[:100]})")
        # In another thread this would only end the thread, and the test would wait for it.
        if threading.current_thread() is threading.main_thread():
            raise NotUnit(f"a unit test {self.acts[-1]}. {_WAY_OUT}")


_current: _Watch | None = None
_installed = False
_slept_s = 0.0
_collection_began = _collected = (0.0, 0.0)
"""Processor time and wall clock at the start of a full garbage collection, and of all of them together."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _current is not None and event in FORBIDDEN:
        _current.see(event, args[1] if len(args) > 1 else args)


def _install() -> None:
    """Install the hooks once per process and for good: an audit hook cannot be removed."""
    global _installed
    if _installed:
        return
    _installed = True
    sys.addaudithook(_audit)
    # This is how multiprocessing starts a process, which is not audited.
    start = _posixsubprocess.fork_exec

    def fork_exec(*args: Any) -> int:
        _audit("os.posix_spawn", ("", args[0]))
        return start(*args)

    _posixsubprocess.fork_exec = fork_exec
    sleep = time.sleep

    def asked_sleep(seconds: Any) -> None:
        global _slept_s
        if threading.current_thread() is threading.main_thread():
            _slept_s += float(seconds)
        sleep(seconds)

    time.sleep = asked_sleep
    gc.callbacks.append(_on_collection)


def _on_collection(phase: str, info: Mapping[str, int]) -> None:
    """Add up the time of full collections: they visit what earlier tests made and loaded."""
    global _collection_began, _collected
    if info["generation"] < 2:
        return
    now = time.process_time(), time.monotonic()
    if phase == "start":
        _collection_began = now
    else:
        computed, wall = (end - began for end, began in zip(now, _collection_began, strict=True))
        _collected = _collected[0] + computed, _collected[1] + wall


def is_watching() -> bool:
    """Return whether a test is being watched now."""
    return _current is not None


@contextmanager
def no_outside() -> Iterator[None]:
    """Raise NotUnit if the block starts a process or opens a socket."""
    global _current
    _install()
    around, watch = _current, _Watch()
    _current = watch
    try:
        yield
    finally:
        _current = around
    if watch.acts:
        raise NotUnit(f"a unit test {watch.acts[0]}, and does not end by that. {_WAY_OUT}")


def _loop() -> float:
    """Compute a fixed amount and return its processor time in seconds."""
    began, total = time.process_time(), 0
    for number in range(200_000):
        total += number * number % 7
    return time.process_time() - began


def slowness() -> float:
    """Return how many times slower than the core of `FAST_LOOP_S` this one is now, at least 1.

    Processor time grows when another virtual machine computes on the other half of the same core: a factor
    of two, changing from minute to minute.
    """
    return max(1.0, max(_loop() for _ in range(5)) / FAST_LOOP_S)


@contextmanager
def short(limit_s: float = LIMIT_S, slowness: Callable[[], float] = slowness) -> Iterator[None]:
    """Raise NotUnit if the block by itself takes longer than the limit would be on a fast core."""
    spent = OwnTime()
    with spent.without_imports():
        yield
    time_spent = spent.so_far()
    if time_spent.own() > limit_s and (seconds := time_spent.own(slowness())) > limit_s:
        raise NotUnit(
            f"a unit test takes {seconds:.1f} s of its own, more than {limit_s:g} s. Make it smaller (fewer "
            f"examples, smaller sizes, one fixture for the file), or mark it `ranks`"
        )


@cache
def _pressure_files() -> tuple[int, ...]:
    """Return descriptors that stay open, as each test would need them twice."""
    try:
        return tuple(os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in Path("/proc/pressure").iterdir())
    except OSError:
        return ()


def stalls_s() -> float | None:
    """Return how long processes waited for a core, a drive or memory; None if the kernel does not say."""
    try:
        lines = [os.pread(file, 4096, 0).partition(b"\n")[0] for file in _pressure_files()]
    except OSError:
        return None
    found = [int(line.rpartition(b"total=")[2]) for line in lines if line.startswith(b"some ")]
    return sum(found) / 1e6 if found else None


class Spent(NamedTuple):
    """Time of a test, in seconds."""

    computed: float
    slept: float
    wall: float
    is_quiet: bool
    """Whether nothing on the machine had to wait meanwhile."""

    def own(self, slowness: float = 1.0) -> float:
        """Return the test's own time, as it would be on a core that is so many times faster."""
        computed = self.computed / slowness
        if self.is_quiet:
            return max(computed + self.slept, self.wall - self.computed + computed)
        return computed / BUSY_FACTOR + self.slept


class OwnTime:
    """Time that a test takes by itself, however busy the machine is: processor time and requested sleep.

    The wall clock counts as well if nothing on the machine had to wait meanwhile. Otherwise processor time
    counts half. Full garbage collections do not count.
    """

    def __init__(
        self,
        wall_s: Callable[[], float] = time.monotonic,
        stalls_s: Callable[[], float | None] = stalls_s,
    ) -> None:
        _install()
        self._wall_s, self._stalls_s = wall_s, stalls_s
        self._computed_at, self._slept_at = time.process_time(), _slept_s
        self._began_at, self._stalled_at = wall_s(), stalls_s()
        self._collected_at = _collected

    def so_far(self) -> Spent:
        """Return the time since the beginning."""
        collected = _collected[0] - self._collected_at[0], _collected[1] - self._collected_at[1]
        computed = time.process_time() - self._computed_at - collected[0]
        wall, stalled = self._wall_s() - self._began_at - collected[1], self._stalls_s()
        before = self._stalled_at
        is_quiet = None if before is None or stalled is None else stalled - before <= QUIET_SHARE * wall
        return Spent(computed, _slept_s - self._slept_at, wall, bool(is_quiet))

    @contextmanager
    def without_imports(self) -> Iterator[None]:
        """Exclude imports in the block from the test's time and from its actions.

        The first test that needs a module imports it for all, and some imports do forbidden things: urllib3
        looks for IPv6 with a socket.
        """
        original, inside = builtins.__import__, False

        def load(*args: Any, **kwargs: Any) -> Any:
            global _current
            nonlocal inside
            if inside or threading.current_thread() is not threading.main_thread():
                return original(*args, **kwargs)
            inside, computed, slept, wall = True, time.process_time(), _slept_s, self._wall_s()
            around, _current = _current, None
            try:
                return original(*args, **kwargs)
            finally:
                inside, _current = False, around
                self._computed_at += time.process_time() - computed
                self._slept_at += _slept_s - slept
                self._began_at += self._wall_s() - wall

        builtins.__import__ = load
        try:
            yield
        finally:
            builtins.__import__ = original


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with no_outside() if tier_of(item) == "unit" else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if tier_of(item) != "unit":
        return (yield)
    with short(), no_outside():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    # After a process's last test comes the end of what all its tests shared, clusters too.
    is_watched = tier_of(item) == "unit" and nextitem is not None
    with no_outside() if is_watched else nullcontext():
        return (yield)
