"""Time that a rank loses to a collective on CUDA: the wait of its stream, not the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import GLOBAL_BATCH, Case, micro_batches
from zerotrain.runtime.comm import timing
from zerotrain.runtime.comm.accounts import Accounts
from zerotrain.runtime.comm.timing import CollectiveSample, Stopwatch
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train.stragglers import WINDOW, OwnTimes

RANKS, STEP_S = 4, 1.0


class Stream:
    """A device's stream: work is queued in order, and events take the time when it reaches them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds

    def wait_until(self, seconds: float) -> None:
        self.now_s = max(self.now_s, seconds)

    def event(self) -> Event:
        return Event(self)


class Event:
    """An event of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._at_s = stream, -1.0

    def record(self, stream: object) -> None:
        assert stream == torch.device("cuda"), "the stream of the engine's device, whichever is current"
        self._at_s = self._stream.now_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._at_s - self._at_s) * 1e3


def stopwatch(samples: list[CollectiveSample]) -> Stopwatch:
    return Stopwatch(torch.device("cuda"), samples.append)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream()
    monkeypatch.setattr(timing, "_event", found.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return found


@pytest.mark.unit
def test_without_steps_the_events_are_used_again(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation at stage 3 waits for hundreds of gathers, and no step polls."""
    made: list[Event] = []

    def make() -> Event:
        made.append(stream.event())
        return made[-1]

    monkeypatch.setattr(timing, "_event", make)
    samples: list[CollectiveSample] = []
    watch, count = stopwatch(samples), 4 * timing.MAX_UNREPORTED
    for seconds in range(count):
        measurement = watch.start("all_gather", "unit", 8)
        stream.compute(float(seconds))
        measurement.ask()
        measurement.end()
    watch.poll()
    assert [sample.seconds for sample in samples] == [float(seconds) for seconds in range(count)]
    assert len(made) <= 3 * (timing.MAX_UNREPORTED + 1)


def gathered(stream: Stream, *, before_s: float, ends_at_s: float) -> CollectiveSample:
    """Return a sample of a gather that is prefetched during `before_s` of computation."""
    samples: list[CollectiveSample] = []
    watch = stopwatch(samples)
    measurement = watch.start("all_gather", "unit", 8)
    stream.compute(before_s)
    measurement.ask()
    stream.wait_until(ends_at_s)
    measurement.end()
    watch.poll()
    (sample,) = samples
    return sample


@pytest.mark.unit
def test_what_is_hidden_under_computation_is_no_wait(stream: Stream) -> None:
    sample = gathered(stream, before_s=0.5, ends_at_s=0.4)
    assert (sample.seconds, sample.exposed_seconds) == (0.5, 0.0)


@pytest.mark.unit
def test_only_the_part_after_the_computation_is_a_wait(stream: Stream) -> None:
    sample = gathered(stream, before_s=0.25, ends_at_s=1.0)
    assert (sample.seconds, sample.exposed_seconds) == (1.0, 0.75)


@pytest.mark.unit
def test_a_stream_beside_the_computation_loses_no_time(stream: Stream) -> None:
    """Waits of that stream are not exposed; those of the computation for it are, but of no collective."""
    accounts = Accounts(torch.device("cuda"))
    measurement = accounts.stopwatch.start("reduce_scatter", "unit", 8)
    with accounts.stopwatch.aside():
        measurement.ask()
        stream.wait_until(1.0)
        measurement.end()
    accounts.poll_timings()
    assert [(each.seconds, each.exposed_seconds) for each in accounts.timings] == [(1.0, 0.0)]
    assert accounts.take_wait_seconds() == 0.0
    with accounts.stopwatch.waiting():
        stream.wait_until(1.5)
    accounts.poll_timings()
    assert len(accounts.timings) == 1
    assert accounts.take_wait_seconds() == 0.5


@pytest.mark.unit
def test_the_late_rank_stands_out_although_all_hosts_take_the_whole_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 comes to the collective after a second, the others after half of one."""
    own_s = [STEP_S if rank == 2 else STEP_S / 2 for rank in range(RANKS)]
    waits = []
    for seconds in own_s:
        device = Stream()
        monkeypatch.setattr(timing, "_event", device.event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
        waits.append(gathered(device, before_s=seconds, ends_at_s=STEP_S).exposed_seconds)
    times = OwnTimes(RANKS)
    for _ in range(WINDOW):
        times.add(
            StepResult(
                step=1, at_boundary=True, rank_seconds=(STEP_S,) * RANKS, rank_wait_seconds=tuple(waits)
            )
        )
    assert times.slowest is not None
    assert (times.slowest.rank, times.slowest.own_seconds, times.slowest.median_seconds) == (2, 1.0, 0.5)


def waits_of_a_step() -> tuple[tuple[float, ...], float]:
    """Return the waits of a step in which every poll of the device adds a quarter of a second."""
    case = Case(stage=1)
    engine, *_ = zt.initialize(model=case.model(), config=case.config(1))

    def poll() -> None:
        engine.comm.wait_seconds += 0.25

    engine.comm.poll_timings = poll  # type: ignore[method-assign]
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    engine.backward(engine(*micro_batches(batch, world_size=1, accumulation=1)[0][0]))
    result = engine.step()
    engine.close()
    return result.rank_wait_seconds, result.seconds["wait"]


@pytest.mark.ranks
def test_a_step_reports_its_own_waits_not_those_of_the_one_before() -> None:
    """Times of the device before the ranks exchange their times, and after."""
    assert run_ranks(1, waits_of_a_step) == [((0.25,), 0.5)]


@pytest.mark.unit
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_a_real_stream_that_waits_for_another_one() -> None:
    cuda: Any = torch.cuda  # without its own annotations
    samples: list[CollectiveSample] = []
    watch, side = stopwatch(samples), cuda.Stream()
    done = cuda.Event()
    with cuda.stream(side):
        cuda._sleep(400_000_000)
        done.record()
    measurement = watch.start("all_gather", "unit", 8)
    cuda._sleep(100_000_000)
    measurement.ask()
    cuda.current_stream().wait_event(done)
    measurement.end()
    cuda.synchronize()
    watch.poll()
    (sample,) = samples
    assert 0.5 * sample.seconds < sample.exposed_seconds < 0.9 * sample.seconds
