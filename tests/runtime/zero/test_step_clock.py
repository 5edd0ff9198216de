"""Time in which training stands still counts for no step, wherever the wait was.

An hour is added to every clock while it stands still, so that no real second matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.just_in_time import Run, engine_of, train_step
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.observer import EngineObserver
from zerotrain.runtime.train.progress_reporter import ProgressReporter

pytestmark = pytest.mark.unit


HOUR = 3600.0


def spend_an_hour(engine: Engine) -> None:
    """Add an hour, as an evaluation would that waited for the last update and for the other ranks."""
    updates = engine.core.updates
    updates.fence_seconds += HOUR
    updates.replicas.seconds += HOUR
    engine.comm.wait_seconds += HOUR
    for name in ("forward", "backward"):
        # Such a pass began an hour ago, and did not wait: `now` stands still for waits.
        engine.clock.add(name, since=engine.clock.now() - HOUR)


class Slow(EngineObserver):
    """An observer in whose saves and loads an hour passes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def saving(self) -> Iterator[None]:
        yield
        spend_an_hour(self.engine)

    @contextmanager
    def loading(self) -> Iterator[None]:
        yield
        spend_an_hour(self.engine)


def check_next(engine: Engine) -> None:
    train_step(engine, engine.global_steps)
    result = engine.last_step
    assert result is not None
    assert {name: seconds for name, seconds in result.seconds.items() if seconds >= HOUR} == {}
    assert result.rank_seconds[0] < HOUR
    assert result.rank_wait_seconds[0] < HOUR
    assert min(result.seconds.values()) >= 0.0


@pytest.mark.parametrize("act", ["save", "load", "pause"])
def test_what_it_stands_still_for_is_no_step(act: str, tmp_path: Path) -> None:
    with engine_of(Run(tier="cpu")) as engine, ProgressReporter() as reporter:
        reporter.watch(engine)
        train_step(engine, 0)
        engine.save_checkpoint(tmp_path)
        engine.observer = Slow(engine)
        if act == "save":
            engine.save_checkpoint(tmp_path)
        elif act == "load":
            engine.load_checkpoint(tmp_path)
        else:
            with reporter.pause():
                spend_an_hour(engine)
        check_next(engine)


def test_a_pause_in_a_pause(tmp_path: Path) -> None:
    with engine_of(Run(tier="cpu")) as engine:
        train_step(engine, 0)
        engine.observer = Slow(engine)
        with engine.clock.standing_still():
            spend_an_hour(engine)
            engine.save_checkpoint(tmp_path)
            spend_an_hour(engine)
        check_next(engine)


def test_what_was_before_it_still_counts() -> None:
    """The micro-batches of a step that is interrupted are a part of it."""
    with engine_of(Run(tier="cpu")) as engine:
        train_step(engine, 0)
        spend_an_hour(engine)
        with engine.clock.standing_still():
            pass
        train_step(engine, 1)
        assert engine.last_step is not None
        seconds = engine.last_step.seconds
        assert min(seconds[name] for name in ("forward", "backward", "optimizer", "gather", "wait")) >= HOUR
