"""The history of an attempt: it is bounded, never blocks the training, and is intact after a kill."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.support.trainer_runs import TrainerRun, job
from zerotrain.cli.report.facts import curves
from zerotrain.contract.history import (
    HISTORY_DIR,
    MAX_FILES,
    AttemptRecord,
    Event,
    Point,
    file_name,
    files_of,
    read_folder,
)
from zerotrain.runtime.train.history import HistoryFile, HistoryWriter

RECORD = AttemptRecord(attempt=1, job="j", job_uid="u")


def points(count: int) -> list[Point]:
    return [
        Point(step=step, loss=1.0 / step, loss_low=1.0 / step, loss_high=1.0 / step, tokens=10)
        for step in range(1, count + 1)
    ]


@pytest.mark.unit
def test_a_long_attempt_stays_small_and_loses_no_step(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path, RECORD, max_points=64)
    file.start()
    for item in points(10_000):
        file.extend([item])
        if item.step % 1000 == 0:
            assert len(files_of(tmp_path)[0].read_text().splitlines()) <= 65
    file.extend([Event(event="ended", step=10_000, time=1.0)])
    file.finish()
    (attempt,) = read_folder(tmp_path).attempts
    assert len(attempt.points) <= 65
    assert sum(item.steps for item in attempt.points) == 10_000
    assert sum(item.tokens for item in attempt.points) == 100_000
    assert attempt.last_step == 10_000
    assert attempt.points[0].loss_high == 1.0
    assert attempt.events[-1].event == "ended"


@pytest.mark.unit
def test_old_attempts_go_and_nothing_else(tmp_path: Path) -> None:
    for number in range(1, MAX_FILES + 5):
        path = tmp_path / file_name(number, "u")
        path.write_text("")
        os.utime(path, (number, number))
    (tmp_path / "mine.txt").write_text("kept")
    HistoryFile(tmp_path, AttemptRecord(attempt=1, job="j", job_uid="new")).start()
    names = {path.name for path in files_of(tmp_path)}
    assert len(names) == MAX_FILES
    assert {file_name(1, "new"), file_name(MAX_FILES + 4, "u")} <= names
    assert file_name(1, "u") not in names
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.unit
def test_what_cannot_be_written_is_logged_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file in the folder's place")
    logged: list[str] = []
    writer = HistoryWriter(tmp_path / "history", RECORD, say=logged.append)
    for item in points(3):
        writer.add(item)
    writer.close()
    assert len(logged) == 1
    assert "is not kept" in logged[0]


@pytest.mark.unit
def test_a_volume_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(HistoryFile, "start", lambda self: hung.wait())
    writer = HistoryWriter(tmp_path, RECORD, say=lambda text: None)
    for item in points(50_000):  # more than may wait
        writer.add(item)
    writer.close(timeout_s=0.05)
    assert not hung.is_set()
    hung.set()


@pytest.mark.ranks
def test_a_killed_attempt_and_its_successor(tmp_path: Path) -> None:
    """The ranks are real: the first attempt is killed after a checkpoint, the second resumes from it."""
    folder = tmp_path / "c"
    spec = job(steps=2000)
    first = TrainerRun(tmp_path / "a", spec, world_size=2, checkpoint_dir=folder).start()
    first.wait_for("checkpoint of step 6 is durable")
    for rank in (0, 1):
        first.signal(rank, signal.SIGKILL)
    first.wait()
    last = max(first.losses())
    data = spec["data_path"]
    second = TrainerRun(
        tmp_path / "b", job(steps=last + 6, data_path=data), world_size=2, attempt=2, checkpoint_dir=folder
    ).start()
    log = second.finish()
    history = read_folder(folder / HISTORY_DIR)
    assert history.unreadable <= 1
    one, two = history.attempts
    resumed = two.record.resumed_from
    assert resumed is not None
    assert f"resumed from step {resumed}" in log
    assert [item.step for item in two.points] == list(range(resumed + 1, last + 7))
    assert {item.step: f"{item.loss:.4f}" for item in two.points} == second.losses()
    assert all(
        item.seconds > 0 and {"data", "forward", "backward"} <= set(item.phases) for item in two.points
    )
    assert two.points[-1].memory["engine"] <= two.record.planned["engine"]
    assert [item.event for item in two.events if item.event == "ended"] == ["ended"]
    assert two.events[-1].text == "stopped in order"
    assert not [item for item in one.events if item.event == "ended"]
    kept = [item.step for curve in curves(history.attempts) for item in curve.kept]
    assert kept == sorted(set(kept)), "a step counts twice"
    text = "".join(path.read_text() for path in files_of(folder / HISTORY_DIR))
    assert "quick brown fox" not in text
