"""Memory of weights that a module on a stream of its own has read is not handed to others before it is done.

Storages are resized as on a GPU, on CPU tensors; streams are names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks, use_transport
from zerotrain.runtime.comm.streams import ComputeStream
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero import buffer
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.quantize import INT8
from zerotrain.runtime.zero.zeropp import WeightTraffic

pytestmark = pytest.mark.ranks


class Streams:
    """The current stream, and which ones the allocator was told of, by address."""

    def __init__(self) -> None:
        self.current = "main"
        self.recorded: list[str] = []

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def install(self) -> None:
        """Replace torch's and the buffers' functions in this process, which ends with the test."""
        tensor: Any = torch.Tensor
        tensor.record_stream = lambda _tensor, stream: self.recorded.append(stream)
        buffer.has_pages = lambda device: False
        buffer.stream_on = lambda device: self.current


class Branch(nn.Module):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(64, 64) for _ in range(3))
        self.streams, self.side = streams, "main"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.one(hidden)
        with self.streams.on(self.side):
            hidden = self.two(hidden)
        total: torch.Tensor = self.three(hidden).sum()
        return total


def recorded_by_side() -> dict[str, list[str]]:
    """Return the streams of which the allocator is told in the second forward pass, by that of the branch."""
    streams = Streams()
    streams.install()
    model = Branch(streams)
    engine, *_ = zt.initialize(model=model, config=config(3))
    found = {}
    for side in ("main", "side"):
        model.side = side
        for _ in range(2):
            streams.recorded.clear()
            with torch.no_grad():
                engine(torch.ones(1, 64))
        found[side] = list(streams.recorded)
    engine.close()
    return found


def test_the_allocator_knows_of_another_stream_alone() -> None:
    with use_transport("gloo"):
        for found in run_ranks(2, recorded_by_side):
            assert found["main"] == []
            assert found["side"] == ["side"] * 2, "gathered ahead on the main stream; used and freed here"


class OneOfTwo:
    """A rank whose gathers bring its own part twice."""

    rank, world_size = 0, 2

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        full.view(2, -1)[1].copy_(shard)
        self.gathered = full.data_ptr()
        return Pending.done()


def test_the_allocator_knows_who_reads_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.data_ptr(), stream))
    )
    comm: Any = OneOfTwo()
    full, shard = torch.zeros(1024, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
    pending = WeightTraffic(comm, MemoryLedger(), neighbours=None, quantizer=INT8).gather(
        full, shard, label=""
    )
    monkeypatch.setattr(ComputeStream, "current", lambda _device: ComputeStream("side"))
    pending.wait()
    assert full.eq(1.0).all()
    assert recorded == [(comm.gathered, "side")]
