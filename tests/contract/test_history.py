"""The history of an attempt: written records are read again; sizes are bounded; torn and hostile lines do no
harm.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from zerotrain.contract.history import (
    HISTORY_DIR,
    AttemptHistory,
    AttemptRecord,
    Event,
    History,
    Point,
    file_name,
    files_of,
    history_lines,
    read_folder,
    read_lines,
    thinned,
    to_line,
)

pytestmark = pytest.mark.unit


def point(step: int, loss: float | None = 2.0, **values: float) -> Point:
    return Point(
        step=step,
        time=1_700_000_000.125 + step,
        loss=loss,
        loss_low=loss,
        loss_high=loss,
        grad_norm=1.0,
        grad_norm_high=1.0 + step % 7,
        seconds=0.5,
        tokens=100,
        phases={"forward": 0.2, "backward": 0.3},
        memory={"engine": 1000 + step},
        **values,  # type: ignore[arg-type]
    )


def test_what_is_written_is_read() -> None:
    record = AttemptRecord(attempt=3, job="gpt", job_uid="u", time=1.5, resumed_from=0, facts={"a": "b"})
    points = [point(1, loss=0.0), point(2, loss=None)]
    events = [Event(event="checkpoint", step=0, time=0.0, seconds=0.0, num_bytes=7, text="x\ny")]
    read = read_lines([to_line(record), *map(to_line, points), *map(to_line, events)])
    assert read == History(
        attempts=(AttemptHistory(record=record, points=tuple(points), events=tuple(events)),)
    )


def test_numbers_without_a_form_in_json_are_left_out() -> None:
    line = to_line(Point(step=1, loss=float("nan"), grad_norm=float("inf")))
    assert json.loads(line) == {"kind": "point", "step": 1}


def test_merging_keeps_sums_means_and_extremes() -> None:
    randomly = random.Random(0)
    points = [point(step, loss=randomly.uniform(1, 9)) for step in range(1, 1001)]
    losses = [item.loss for item in points if item.loss is not None]
    merged = thinned(points, 64)
    assert len(merged) <= 64
    assert sum(item.steps for item in merged) == 1000
    assert sum(item.tokens for item in merged) == 100_000
    assert sum(item.seconds for item in merged) == pytest.approx(500.0)
    assert min(item.loss_low or 99 for item in merged) == min(losses)
    assert max(item.loss_high or 0 for item in merged) == max(losses)
    weighted = sum((item.loss or 0) * item.steps for item in merged) / 1000
    assert weighted == pytest.approx(sum(losses) / 1000)
    assert [item.step for item in merged] == sorted(item.step for item in merged)
    assert merged[-1].step == 1000
    assert merged[-1].memory["engine"] == 2000


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"kind":"point"}',
        '{"kind":"point","step":-1}',
        '{"kind":"point","step":1,"loss":"2"}',
        '{"kind":"point","step":1,"loss":NaN}',
        '{"kind":"point","step":1,"loss":true}',
        '{"kind":"point","step":99999999999999999999}',
        '{"kind":"point","step":1,"memory":{"a":-5}}',
        '{"kind":"point","step":1,"phases":[1]}',
        '{"kind":"other","step":1}',
        '{"kind":["point"],"step":1}',
        "[" * 100_000,
        '{"kind":"event","event":"' + "x" * 10_000 + '","step":1,"time":1}',
    ],
)
def test_lines_of_others_are_counted_and_passed_over(line: str) -> None:
    record = to_line(AttemptRecord(attempt=1, job="j"))
    read = read_lines([record, line, to_line(point(1))])
    assert read.unreadable == (1 if line else 0)
    assert [item.step for item in read.attempts[0].points] == [1]


def test_later_versions_may_add_keys_and_texts_are_cut() -> None:
    line = json.dumps({"kind": "attempt", "attempt": 1, "job": "j" * 1000, "new": 1})
    read = read_lines([line])
    assert (read.unreadable, len(read.attempts[0].record.job)) == (0, 300)


def test_an_answer_is_bounded_and_loses_resolution_first() -> None:
    points = tuple(point(step) for step in range(1, 1000))
    attempts = tuple(
        AttemptHistory(
            record=AttemptRecord(attempt=number, job="j", time=float(number)),
            points=points,
        )
        for number in range(1, 5)
    )
    lines = history_lines(History(attempts=attempts), max_bytes=100_000)
    assert sum(map(len, lines)) <= 100_000
    read = read_lines(lines)
    assert [item.record.attempt for item in read.attempts] == list(range(1, 5))
    assert all(item.points[-1].step == 999 for item in read.attempts)
    assert len(read_lines(history_lines(History(attempts=attempts), max_bytes=2_000)).attempts) < 4


def test_a_folder_is_read_by_its_names_alone(tmp_path: Path) -> None:
    """The reader opens neither a pipe, which would block, nor a link, which leads elsewhere, nor another
    job's attempt.
    """
    folder = tmp_path / HISTORY_DIR
    folder.mkdir()
    for uid, step in (("uid-a", 1), ("uid-b", 2)):
        path = folder / file_name(1, uid)
        path.write_text(to_line(AttemptRecord(attempt=1, job="j", job_uid=uid)) + to_line(point(step)))
    (tmp_path / "secret").write_text(to_line(AttemptRecord(attempt=9, job="other")))
    (folder / "attempt-000009-link.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "attempt-000008-pipe.jsonl")
    (folder / "attempt-x.jsonl").write_text("no")
    assert len(files_of(folder)) == 2
    assert [item.points[0].step for item in read_folder(folder).attempts] == [1, 2]
    assert [item.points[0].step for item in read_folder(folder, job_uid="uid-b").attempts] == [2]
    assert read_folder(tmp_path / "nowhere") == History()


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    whole = to_line(AttemptRecord(attempt=1, job="j")) + to_line(point(1)) + to_line(point(2))
    path = tmp_path / file_name(1, "u")
    for end in range(0, len(whole), 5):
        path.write_text(whole[:end])
        read = read_folder(tmp_path)
        assert read.unreadable <= 1
        assert len(read.attempts) <= 1
    assert file_name(1, "../../x") == "attempt-000001-x.jsonl"


def test_a_number_that_no_axis_can_show_is_cut_and_a_point_has_a_step() -> None:
    lines = [
        '{"kind": "attempt", "attempt": 1, "job": "gpt"}',
        '{"kind": "point", "step": 1, "loss": 1e308, "learning_rate": -1e308}',
        '{"kind": "point", "step": 2, "steps": 0, "loss": 1.0}',
    ]
    found = read_lines(lines)
    (point,) = found.attempts[0].points
    assert (point.loss, point.learning_rate, found.unreadable) == (1e30, -1e30, 1)
