"""The ConfigMap of a hang: a summary that puts the odd rank first, bounded, without control characters."""

from __future__ import annotations

import pytest

from tests.support.jobs import make_job
from zerotrain.operator.resources import diagnostics
from zerotrain.operator.resources.diagnostics import (
    CUT,
    MAX_STACKS_BYTES,
    MAX_STACKS_LINES,
    WorkerStacks,
    read_stacks,
    stacks_config_map,
    summary,
)

pytestmark = pytest.mark.unit


WAITING = """\
=== rank {rank} (pid 11, sleeping)
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/app/channel.py", line 5 in _run

Current thread 0x00007f2 (most recent call first):
  File "/app/comm/work.py", line 88 in _wait_watched
  File "/app/comm/timing.py", line 60 in wait
  File "/app/step.py", line 7 in agree
"""
STOPPED = "=== rank {rank} (pid 12, stopped by a signal)\n(no stacks: ...)\n"


def read(*texts: str) -> dict[int, WorkerStacks]:
    """Return the stacks of the workers with these texts."""
    return {worker: read_stacks(text, workers=len(texts)) for worker, text in enumerate(texts)}


def test_the_rank_that_stands_elsewhere_comes_first() -> None:
    texts = [WAITING.format(rank=0) + STOPPED.format(rank=1), WAITING.format(rank=2) + WAITING.format(rank=3)]
    said = summary(read(*texts).values(), 4)
    assert said.index("rank 1\n  process: stopped by a signal") < said.index("3 ranks: 0, 2, 3")
    assert "_wait_watched (/app/comm/work.py:88)" in said
    assert "threading.py" not in said, "helper threads tell nothing"


def test_it_belongs_to_the_job_and_the_attempt() -> None:
    made = stacks_config_map(make_job({}), 3, read("", WAITING.format(rank=1)))
    assert made["metadata"]["name"] == f"{make_job({}).name}-3-stacks"
    assert made["metadata"]["labels"]["zerotrain.dev/attempt"] == "3"
    assert made["metadata"]["ownerReferences"][0]["controller"] is True
    assert set(made["data"]) == {"summary.txt", "worker-0.txt", "worker-1.txt"}


def test_hostile_texts_are_bounded_and_cannot_drive_a_terminal() -> None:
    flood = "=== rank 1 (pid 1, x)\n" * 30_000
    made = stacks_config_map(
        make_job({}), 1, read(flood, "\x1b]0;owned\x07\x00\ud800" + "ü" * MAX_STACKS_BYTES, "")
    )
    whole = "".join(made["data"].values())
    assert len(whole.encode()) <= MAX_STACKS_BYTES
    assert CUT in made["data"]["worker-1.txt"]
    assert made["data"]["worker-1.txt"].startswith("??ü")


def test_what_is_kept_of_a_hostile_text_is_its_share_and_as_many_ranks_as_a_worker_has() -> None:
    headers = "".join(f"=== rank {rank} (pid 1, x)\n" for rank in range(40_000))
    kept = read(headers, *[""] * 31)[0]
    assert len(kept.text) <= MAX_STACKS_BYTES // 32
    assert [rank for rank, _ in kept.places] == list(range(64))


def test_of_short_lines_a_bounded_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()

    def unchanged(line: str) -> str:
        lines.append(line)
        return line

    monkeypatch.setattr(diagnostics, "printable", unchanged)
    kept = read("\x01\n" * (MAX_STACKS_BYTES // 2))[0]
    assert len(lines) == MAX_STACKS_LINES
    assert kept.text == "\x01\n" * (MAX_STACKS_LINES - 1) + "\x01"
