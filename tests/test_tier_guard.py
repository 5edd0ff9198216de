"""A unit test that starts a process, opens a socket or takes more than its second fails by itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tier_guard
from tests.support.tier_guard import NotUnit, OwnTime, no_outside, short

TRUE = "/bin/true"


def nothing() -> None:
    """Do nothing, as the target of a process."""


def spawn() -> None:
    multiprocessing.get_context("spawn").Process(target=nothing).start()


async def run_in_loop() -> None:
    await asyncio.create_subprocess_exec(TRUE)


def listen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 9))


def connect() -> None:
    with socket.socket() as client:
        client.connect(("127.0.0.1", 9))


ACTS: list[tuple[Callable[[], object], str]] = [
    (lambda: subprocess.run([TRUE], check=True), "starts a process"),
    (lambda: os.system(TRUE), "starts a process"),
    (os.fork, "starts a process"),
    (lambda: os.posix_spawn(TRUE, [TRUE], {}), "starts a process"),
    (spawn, "starts a process"),
    (lambda: asyncio.run(run_in_loop()), "starts a process"),
    (listen, "opens a socket"),
    (connect, "opens a socket"),
]
NAMES = ["subprocess", "system", "fork", "posix_spawn", "multiprocessing", "asyncio", "bind", "connect"]


@pytest.mark.unit
@pytest.mark.parametrize(("act", "message"), ACTS, ids=NAMES)
def test_the_act_itself_fails(act: Callable[[], object], message: str) -> None:
    with pytest.raises(NotUnit, match=f"a unit test {message} .*Mark it `ranks`"), no_outside():
        act()


@pytest.mark.unit
def test_whoever_swallows_that_fails_in_the_end() -> None:
    swallowed = contextlib.suppress(AssertionError)
    with pytest.raises(NotUnit, match="and does not end by that"), no_outside(), swallowed:
        connect()


@pytest.mark.ranks
def test_a_thread_of_the_test_is_part_of_it() -> None:
    with pytest.raises(NotUnit, match="opens a socket"), no_outside():
        in_a_thread(connect_and_ignore_errors)


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def connect_and_ignore_errors() -> None:
    with contextlib.suppress(OSError):
        connect()


@pytest.mark.unit
def test_an_event_loop_and_threads_are_allowed() -> None:
    with no_outside():
        asyncio.run(asyncio.sleep(0))
        in_a_thread(nothing)


def compute(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.unit
@pytest.mark.parametrize("spend", [compute, sleep])
def test_a_test_that_takes_long_fails(spend: Callable[[float], None]) -> None:
    message = r"takes 0\.\d s of its own.* Make it smaller"
    with pytest.raises(NotUnit, match=message), short(0.05, lambda: 1.0):
        spend(0.1)
    with short(0.05):
        pass


@pytest.mark.unit
def test_a_slow_core_has_more_time() -> None:
    with short(0.05, lambda: 9.0):
        compute(0.1)
    assert tier_guard.slowness() >= 1


def spent(*, stalls: tuple[float, float] | None) -> float:
    """Return the own time of a test that computes nothing and lasts an hour; `stalls` are the stall counter's
    readings at its beginning and end, in seconds.
    """
    wall = iter((0.0, 3600.0)).__next__
    time_of_test = OwnTime(wall, (lambda: None) if stalls is None else iter(stalls).__next__)
    return time_of_test.so_far().own()


@pytest.mark.unit
def test_a_busy_machine_is_not_the_tests_own_time() -> None:
    assert spent(stalls=(5.0, 3600.0)) < 1
    assert spent(stalls=None) < 1, "a kernel that says nothing about stalls"


@pytest.mark.unit
@pytest.mark.parametrize("stalls", [(0.0, 100.0), (5.0, 5.0)])
def test_an_idle_machine_shows_that_the_test_itself_waited(stalls: tuple[float, float]) -> None:
    """The test waited for an event, a reply, or a sleep that is not counted."""
    assert spent(stalls=stalls) == 3600.0


@pytest.mark.unit
def test_a_full_garbage_collection_is_nobodys_time() -> None:
    """The collector visits the objects of all tests that ran before in this process."""
    others: list[list[int]] = [[] for _ in range(1_000_000)]
    limit_s = 0.01
    with short(limit_s):
        began = time.process_time()
        gc.collect()
        taken_s = time.process_time() - began
    assert taken_s > 2 * limit_s, len(others)


@pytest.mark.unit
def test_modules_that_are_loaded_meanwhile_are_nobodys_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    slow = "import time\nuntil = time.process_time() + 0.1\nwhile time.process_time() < until: pass\n"
    (tmp_path / "zt_slow_inner.py").write_text(slow)
    (tmp_path / "zt_slow_outer.py").write_text("import zt_slow_inner\n")
    with short(0.05):
        importlib.import_module("zt_slow_outer")
    assert sys.modules.pop("zt_slow_inner")
    assert sys.modules.pop("zt_slow_outer")


@pytest.mark.unit
def test_this_test_is_guarded(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.is_registered(tier_guard)
    assert tier_guard.is_watching()


TESTS = """
import subprocess
import time

import pytest

@pytest.fixture(scope="module")
def process():
    subprocess.run(["/bin/true"])

@pytest.fixture
def late_process():
    yield
    subprocess.run(["/bin/true"])

@pytest.fixture(scope="session")
def shared():
    yield
    subprocess.run(["/bin/true"])

@pytest.mark.unit
def test_in_a_fixture(process): ...

@pytest.mark.unit
def test_in_the_end_of_a_fixture(late_process): ...

@pytest.mark.unit
def test_of_its_own():
    subprocess.run(["/bin/true"])

@pytest.mark.unit
def test_too_long():
    time.sleep(1.1)

@pytest.mark.unit
async def test_in_a_loop():
    subprocess.run(["/bin/true"])

@pytest.mark.ranks
def test_dearer(shared):
    subprocess.run(["/bin/true"])

@pytest.mark.unit
def test_cheap_while_all_that_is_shared_ends(): ...
"""


@pytest.mark.ranks
def test_pytest_reports_which_tests_failed_and_why(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.tier_guard", "-o", "asyncio_mode=auto"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "-q", "--tb=line", "-p", "no:cacheprovider", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    ended = re.findall(r"^(FAILED|ERROR) \S*::(\w+)", done.stdout, flags=re.MULTILINE)
    assert set(ended) == {
        ("ERROR", "test_in_a_fixture"),
        ("ERROR", "test_in_the_end_of_a_fixture"),
        ("FAILED", "test_of_its_own"),
        ("FAILED", "test_too_long"),
        ("FAILED", "test_in_a_loop"),
    }, done.stdout
    assert "a unit test takes 1.1 s of its own, more than 1 s" in done.stdout
