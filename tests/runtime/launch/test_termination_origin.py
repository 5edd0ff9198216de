"""The termination message of a worker names the checkpoint with which its ranks began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launcher import spec_for
from zerotrain.contract.progress import Progress, Termination
from zerotrain.runtime.launch.rank_table import RankTable
from zerotrain.runtime.launch.termination import compose, write

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("uid", ["uid-of-another", "", None])
def test_it_is_what_the_ranks_reported(uid: str | None, tmp_path: Path) -> None:
    board = RankTable(spec_for(tmp_path, ranks=2), built_in_trainer=True)
    for rank in (0, 1):
        board.progressed(rank, Progress(rank=rank, attempt=3, step=60, resumed_from=60, resumed_job=uid))
    write(tmp_path / "message", compose(0, (), board, last_line=None))
    read = Termination.from_json((tmp_path / "message").read_text())
    assert (read.step, read.resumed_from, read.resumed_job) == (60, 60, uid)


def test_a_fresh_start_has_no_origin(tmp_path: Path) -> None:
    board = RankTable(spec_for(tmp_path, ranks=1), built_in_trainer=True)
    board.progressed(0, Progress(rank=0, attempt=3, step=7))
    words = compose(0, (), board, last_line=None)
    assert (words.resumed_from, words.resumed_job) == (None, None)
