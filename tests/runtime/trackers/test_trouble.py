"""A tracker that hangs or fails costs points, never steps: a bounded queue, a thread, one note."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from zerotrain.runtime.trackers.sinks import Sink, Values
from zerotrain.runtime.trackers.writer import TrackerWriter

pytestmark = pytest.mark.ranks

PATIENCE_S = 60.0


class Kept:
    """Sink that keeps points; `error` is raised instead while it is set."""

    def __init__(self) -> None:
        self.points: list[int] = []
        self.is_closed = False
        self.error: BaseException | None = None
        self.held = threading.Event()
        self.held.set()

    def write(self, step: int, values: Values) -> None:
        self.held.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.points.append(step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def notes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "zerotrain"]


def test_a_tracker_that_hangs_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept()
    sink.held.clear()
    with caplog.at_level(logging.WARNING, "zerotrain"):
        writer = TrackerWriter("wandb", lambda step: sink, max_waiting=10)
        began = time.perf_counter()
        for step in range(100):
            writer.put(step, {})
        writer.close(0.1)
        spent = time.perf_counter() - began
    assert spent < PATIENCE_S / 2
    assert 100 - 10 - 1 <= writer.dropped <= 100 - 10
    (note,) = notes(caplog)
    assert "tracker wandb" in note
    sink.held.set()
    writer.close(PATIENCE_S)
    # The thread may take its first point after the queue was full, when some were left out already.
    assert sink.points == sorted(set(sink.points))
    assert sink.points[:10] == list(range(10))
    assert len(sink.points) == 100 - writer.dropped
    assert sink.is_closed


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(3)])
def test_a_tracker_that_fails_is_noted_once_and_used_again(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    sink, opened = Kept(), list[int]()

    def opening(step: int) -> Sink:
        opened.append(step)
        if len(opened) < 3:
            raise error
        return sink

    with caplog.at_level(logging.WARNING, "zerotrain"):
        writer = TrackerWriter("mlflow", opening)
        for step in range(5):
            writer.put(step, {"train/loss": 1.0})
        writer.close(PATIENCE_S)
    assert opened == [0, 1, 2]
    assert sink.points == [2, 3, 4]
    assert writer.dropped == 2
    (note,) = notes(caplog)
    assert type(error).__name__ in note
