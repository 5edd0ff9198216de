"""Lines of several ranks in the launcher's own output."""

from __future__ import annotations

import io
import os
import time

import pytest

from tests.support.launcher import eventually
from zerotrain.runtime.launch import output
from zerotrain.runtime.launch.output import OutputPump, Sink

pytestmark = pytest.mark.unit


class Ranks:
    """Two ranks' pipes, copied into one stream."""

    def __init__(self) -> None:
        self.stream = io.BytesIO()
        sink = Sink(self.stream)
        self._pipes = [os.pipe() for _ in range(2)]
        sources = [os.fdopen(read_end, "rb", 0) for read_end, _ in self._pipes]
        self._pumps = [OutputPump(rank, source, sink) for rank, source in enumerate(sources)]
        for pump in self._pumps:
            pump.start()

    def write(self, rank: int, data: bytes) -> None:
        os.write(self._pipes[rank][1], data)

    def end(self) -> bytes:
        for (_, write_end), pump in zip(self._pipes, self._pumps, strict=True):
            os.close(write_end)
            pump.join()
        return self.stream.getvalue()

    def wait_for(self, text: bytes) -> None:
        eventually(lambda: text in self.stream.getvalue(), what=repr(text))


def test_other_ranks_lines_stay_out_of_a_line_that_rank_0_writes_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "LINE_WAIT_S", 60.0)
    ranks = Ranks()
    ranks.write(0, b"step")
    time.sleep(0.05)  # rank 0's pump has the piece
    ranks.write(1, b"other\n")
    ranks.wait_for(b"other\n")
    ranks.write(0, b" 3")
    ranks.write(0, b"\n")
    assert ranks.end() == b"[rank 1] other\nstep 3\n"


def test_unfinished_line_of_rank_0_is_shown_and_ended_before_another_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "LINE_WAIT_S", 0.01)
    ranks = Ranks()
    ranks.write(0, b"\r10 %")
    ranks.wait_for(b"\r10 %")
    ranks.write(1, b"other\n")
    ranks.wait_for(b"other\n")
    ranks.write(0, b"\r20 %")
    assert ranks.end() == b"\r10 %\n[rank 1] other\n\r20 %\n"
