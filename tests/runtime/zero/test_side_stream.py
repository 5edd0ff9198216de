"""Reductions run on a stream of their own on a GPU, for which backward waits once, when it is over.

The ranks compute on the CPU, on streams that are not there (`fake_streams.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zerotrain.runtime as zt
from tests.support.fake_streams import CUDA, MAIN, SIDE, FakeCuda, FakeStream
from tests.support.just_in_time import Chain, batch, contents
from tests.support.ranks import run_ranks, use_transport
from zerotrain.runtime.comm import sums
from zerotrain.runtime.comm.memory import unfilled
from zerotrain.runtime.comm.streams import ComputeStream, SideStream
from zerotrain.runtime.comm.timing import Pending, Stopwatch
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero import gradient_sum, hierarchy
from zerotrain.runtime.zero.gradients import UnitGradients

BLOCKS = [f"blocks.{index}" for index in range(4)]
BACKWARD = BLOCKS[::-1]
BOUND = 1
"""A bucket that one unit exceeds: while one is sent, the one before it has to be freed."""


def started(stage: int, bucket: int = BOUND, **zero: Any) -> Engine:
    torch.manual_seed(3)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": bucket,
            "stage3_param_persistence_threshold": 0,
            **zero,
        },
    }
    engine, *_ = zt.initialize(model=Chain(), config=settings, unit_modules=[nn.Linear])
    return engine


@contextmanager
def on_streams(engine: Engine) -> Iterator[FakeCuda]:
    """Let the engine reduce as on a GPU, and note exchanges, sums, blocks' backward, and memory allocated and
    given up."""
    cuda, reducer = FakeCuda(), engine.core.reducer
    account, release = engine.comm.account, UnitGradients.release
    comm: Any = engine.comm

    def noted(op: str, label: str, *args: Any, **kwargs: Any) -> Pending:
        pending = account(op, label, *args, **kwargs)
        if op != "reduce_scatter":
            return pending
        hop = "second" if kwargs.get("crossing") and kwargs.get("receivers") else "first"
        cuda.note(hop, label)

        def wait() -> None:
            pending.wait()
            cuda.note(f"{hop} done", label)

        return Pending(wait)

    def summed(*args: Any, **kwargs: Any) -> None:
        sums.accumulate_(*args, **kwargs)
        cuda.note("sum", "")

    def released(part: UnitGradients, flat: torch.Tensor) -> None:
        cuda.note("freed", part.unit.name)
        release(part, flat)

    def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
        cuda.note("allocated", "")
        return unfilled(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        cuda.install(patch)
        patch.setattr(reducer, "side", SideStream(CUDA, comm.stopwatch))
        reducer.replace(list(engine.core.gradients.values()))
        patch.setattr(comm, "account", noted)
        patch.setattr(gradient_sum, "accumulate_", summed)
        patch.setattr(hierarchy, "accumulate_", summed)
        patch.setattr(UnitGradients, "release", released)
        patch.setattr(gradient_sum, "stays", lambda device: False)
        patch.setattr(gradient_sum, "unfilled", allocated)
        for part in engine.core.gradients.values():
            part.sum.close()
        for name in BLOCKS:
            block = engine.module.get_submodule(name)
            block.register_full_backward_hook(lambda *_, name=name: cuda.note("backward", name))
        yield cuda


def check_memory(cuda: FakeCuda, first: str, *, sums_are_freed: bool = True) -> None:
    """Check that the computation waited for the exchange of what it frees, and frees it in time; and that
    memory for sums, which may have had other contents, was free when the other stream went on."""
    flying = 0
    for note in cuda.notes:
        flying += (note.what == "first") - (note.what == "freed")
        assert flying <= 2, "as many as without the stream"
    for name in BLOCKS:
        (freed,), (done,) = cuda.found("freed", name), cuda.found(first, name)
        assert freed.stream == MAIN
        assert freed.seen.get(SIDE, 0) >= done.place, f"{name} was freed while it was sent"
    allocated = cuda.found("allocated")
    assert len(allocated) == (len(BLOCKS) if sums_are_freed else 0)
    for made, sent in zip(allocated, cuda.found("first"), strict=False):
        assert sent.seen[MAIN] >= made.place, (
            f"the sum of {sent.label} is written where others may still read"
        )


def check_streams(cuda: FakeCuda) -> None:
    """Check that nothing of a reduction is on the stream of the computation, and that it waits at the end."""
    for note in cuda.notes:
        assert note.stream == (MAIN if note.what in ("backward", "freed", "allocated") else SIDE), note
    assert cuda.main.seen[SIDE] == max(note.place for note in cuda.notes if note.stream == SIDE)


def one_hop(stage: int) -> bool:
    """Train with one exchange per unit; return whether the result is that without streams."""
    found = []
    for is_apart in (False, True):
        engine = started(stage)
        for step in range(2):
            if is_apart and step:
                with on_streams(engine) as cuda:
                    engine.backward(engine(batch(step).requires_grad_()))
                    check_streams(cuda)
                    check_memory(cuda, "first done", sums_are_freed=stage > 1)
                    assert [note.label for note in cuda.found("first")] == BACKWARD
                    # Before it ended, the exchange of the second unit was freed, without its sum.
                    (last,), second = cuda.found("backward", BACKWARD[-1]), cuda.found("sum")[1]
                    assert last.seen[SIDE] < second.place, "backward waited for a sum"
            else:
                engine.backward(engine(batch(step).requires_grad_()))
            engine.step()
        found.append(contents(engine))
        engine.close()
    return found[0] == found[1]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exchanges_are_summed_beside_backward(stage: int) -> None:
    with use_transport("gloo"):
        assert run_ranks(2, one_hop, stage) == [True, True]


def two_hops(zero: dict[str, Any]) -> bool:
    """Train on two nodes; return whether the result is that without streams."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for is_apart in (False, True):
        engine = started(2, **zero)
        engine.backward(engine(batch(0).requires_grad_()))
        engine.step()
        if is_apart:
            with on_streams(engine) as cuda:
                engine.backward(engine(batch(1).requires_grad_()))
                check_streams(cuda)
                check_memory(cuda, "first done")
                check_hops(cuda)
        else:
            engine.backward(engine(batch(1).requires_grad_()))
        engine.step()
        found.append(contents(engine))
        engine.close()
    return found[0] == found[1]


def check_hops(cuda: FakeCuda) -> None:
    """Check that a unit's second hop is under way before the next unit's backward, which waits for none."""
    host = [(note.what, note.label) for note in cuda.notes]
    for name, following in pairwise(BACKWARD):
        assert host.index(("second", name)) < host.index(("backward", following)), host
        # The first hop of a unit goes out before the second one of the unit before is waited for.
        assert host.index(("first", following)) < host.index(("second done", name)), host
        assert host.index(("second done", name)) < host.index(("second", following)), host
    for place, name in enumerate(BACKWARD):
        (ended,) = cuda.found("backward", name)
        for before in BACKWARD[max(0, place - 2) : place]:  # an older one has to be over, as it holds memory
            (done,) = cuda.found("second done", before)
            assert ended.seen.get(SIDE, 0) < done.place, f"backward of {name} waited for {before}"


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [{}, {"zero_quantized_gradients": True}], ids=["plain", "quantised"])
def test_the_hop_between_nodes_runs_beside_backward(zero: dict[str, Any]) -> None:
    with use_transport("gloo"):
        assert run_ranks(4, two_hops, zero) == [True] * 4


def changed_in_backward() -> bool:
    """Zero, within backward, a gradient that was sent before."""
    engine = started(2)
    with on_streams(engine) as cuda:
        sent = engine.module.get_parameter("blocks.3.weight")
        seen = []

        def drop(*_: Any) -> None:
            assert sent.grad is not None
            sent.grad.zero_()
            seen.append(cuda.main.seen.get(SIDE, 0) == max(n.place for n in cuda.notes if n.stream == SIDE))

        engine.module.get_submodule("blocks.0").register_full_backward_hook(drop)
        engine.backward(engine(batch(0).requires_grad_()))
    engine.close()
    return seen == [True]


@pytest.mark.ranks
def test_a_gradient_that_is_changed_within_backward_is_summed_before() -> None:
    with use_transport("gloo"):
        assert run_ranks(2, changed_in_backward) == [True, True]


@pytest.mark.unit
def test_a_wait_on_another_stream_holds_up_the_computation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is read on a stream of the script is gathered for the stream that trains as well."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(
        FakeStream, "wait_stream", lambda self, other: self.seen.update(other.seen), raising=False
    )
    home, mine = ComputeStream.current(CUDA), FakeStream("script's")
    gather = [Pending(lambda: cuda.note("wait", "")) for _ in range(2)]
    with torch.cuda.stream(mine):  # type: ignore[arg-type]
        home.wait(gather[0])
    assert mine.seen == {MAIN: 1}
    home.wait(gather[1])
    assert [note.stream for note in cuda.found("wait")] == [MAIN, MAIN]


class Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.unit
def test_nothing_fills_what_a_device_receives() -> None:
    with FakeTensorMode(), Filled() as filled:
        received = unfilled(64, torch.bfloat16, CUDA)
    assert (received.device, filled.names) == (CUDA, ["empty"])
    assert unfilled(64, torch.bfloat16, torch.device("cpu")).tolist() == [0.0] * 64, "pages of the system's"


@pytest.mark.unit
def test_marks_are_of_the_engines_gpu_where_another_one_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, other = FakeCuda(), FakeStream("other")
    cuda.install(monkeypatch)
    side: Any = SideStream(CUDA, Stopwatch(torch.device("cpu"), lambda _sample: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: cuda.main if device else other)
    cuda.note("backward", "unit")
    with side.running(after=side.mark()):
        assert side._stream.seen == {MAIN: 1}
