"""A reporter without a launcher does nothing; wrong use still raises an error with the remedy."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.launcher import ROOT
from tests.support.ranks import run_ranks
from zerotrain.runtime.facade.observer import NO_OBSERVER

CONFIG = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}

ALONE = """
import os, signal, threading
import torch
import zerotrain.runtime as zt

with zt.ProgressReporter(total_steps=2) as reporter:
    reporter.stop_on_sigterm()
    with reporter.rendezvous():
        engine = zt.initialize(
            model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "zero_optimization": {"stage": 1}}
        )[0]
    reporter.watch(engine)
    engine.load_checkpoint("c")
    while not engine.stop_agreed:
        loss = engine(torch.ones(1, 2)).mean()
        engine.backward(loss)
        engine.step()
        reporter.step(loss, tokens=4)
        with reporter.pause():
            engine.save_checkpoint("c", asynchronous=True)
        os.kill(os.getpid(), signal.SIGTERM)
        while not engine._state.stop_requested:
            pass
    names = sorted(thread.name for thread in threading.enumerate() if "zerotrain" in thread.name)
    engine.close()
print(names)
"""


@pytest.mark.ranks
def test_without_a_launcher_nothing_is_written_or_sent(tmp_path: Path) -> None:
    """The signal SIGTERM still requests a stop."""
    program = tmp_path / "program.py"
    program.write_text(ALONE)
    environ = {name: text for name, text in os.environ.items() if "ZEROTRAIN" not in name}
    paths = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "runtime")))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output, names = done.stdout.splitlines()
    assert "stop requested" in output
    assert set(eval_names(names)) <= {"zerotrain-stop", "zerotrain-checkpoint"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "program.py"]


def eval_names(text: str) -> list[str]:
    return [name.strip("' ") for name in text.strip("[]").split(",")]


WRONG: dict[str, dict[str, Any]] = {
    "shape": {"loss": torch.ones(3)},
    "text": {"loss": "1.0"},
    "bool": {"loss": True},
    "nothing": {"loss": None},
    "too large": {"loss": 10**400},
    "complex": {"loss": torch.ones(1, dtype=torch.complex64)},
    "tensor tokens": {"tokens": torch.ones(3, dtype=torch.bool).sum()},
    "half tokens": {"tokens": 1.5},
    "no tokens": {"tokens": None},
    "owed tokens": {"tokens": -1},
    "text seconds": {"data_seconds": "1"},
    "nan seconds": {"data_seconds": float("nan")},
    "owed seconds": {"data_seconds": -0.1},
    "endless seconds": {"data_seconds": 10**400},
}
"""Wrong arguments of `step`."""


def misused(case: str) -> str:
    """Return the error of one wrong use, on a rank that no launcher started."""
    reporter = zt.ProgressReporter(total_steps=4)
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    try:
        if case != "unwatched":
            reporter.watch(engine)
        assert engine.observer is NO_OBSERVER
        assert "zerotrain-channel" not in {thread.name for thread in threading.enumerate()}
        loss = engine(torch.ones(1, 2)).mean()
        engine.backward(loss)
        if case == "before":
            reporter.step(loss)
        engine.step()
        if case == "paused":
            with reporter.pause():
                reporter.step(loss)
        reporter.step(**{"loss": loss, **WRONG.get(case, {})})
        if case == "twice":
            reporter.step(loss)
        if case == "other":
            reporter.watch(engine)
        if case == "second":
            zt.ProgressReporter()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("right", "accepted"),
        ("unwatched", "RuntimeError: step() needs the engine: call watch(engine)"),
        ("before", "RuntimeError: step() was called at step 0 without an engine.step() since"),
        ("twice", "RuntimeError: step() was called at step 0 without an engine.step() since"),
        ("other", "RuntimeError: this reporter watches an engine already"),
        ("shape", "ValueError: loss must hold one element; got shape (3,): reduce it"),
        ("text", "TypeError: loss must be a number or a tensor of one element; got str"),
        ("bool", "TypeError: loss must be a number or a tensor of one element; got bool"),
        ("nothing", "TypeError: loss must be a number or a tensor of one element; got NoneType"),
        ("too large", "ValueError: loss must be a number that a float can hold"),
        ("complex", "TypeError: loss must be a real number; got torch.complex64"),
        ("paused", "RuntimeError: step() was called within pause() at step 0"),
        ("second", "RuntimeError: this process has a ProgressReporter already"),
        (
            "tensor tokens",
            "TypeError: tokens must be a whole number of at least 0; got Tensor: pass int(...)",
        ),
        ("half tokens", "TypeError: tokens must be a whole number of at least 0; got float"),
        ("no tokens", "TypeError: tokens must be a whole number of at least 0; got NoneType"),
        ("owed tokens", "ValueError: tokens must be a whole number of at least 0; got -1"),
        ("text seconds", "TypeError: data_seconds must be a number of seconds, or None"),
        ("nan seconds", "ValueError: data_seconds must be finite and at least 0; got nan"),
        ("owed seconds", "ValueError: data_seconds must be finite and at least 0; got -0.1"),
        ("endless seconds", "ValueError: data_seconds must be a number that a float can hold"),
    ],
)
def test_wrong_use_is_refused(case: str, text: str) -> None:
    (output,) = run_ranks(1, misused, case)
    assert output.startswith(text)


@pytest.mark.unit
@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "3"])
def test_wrong_numbers_of_steps_are_refused(steps: Any) -> None:
    with pytest.raises(
        ValueError, match=r"total_steps must be a whole number of at least 1.*got " + re.escape(repr(steps))
    ):
        zt.ProgressReporter(total_steps=steps)


@pytest.mark.unit
def test_only_an_engine_can_be_watched() -> None:
    with (
        zt.ProgressReporter() as reporter,
        pytest.raises(TypeError, match=r"the first of the four that initialize\(\) returns.*got tuple"),
    ):
        reporter.watch((1, 2, 3, 4))  # type: ignore[arg-type]


@pytest.mark.unit
@pytest.mark.parametrize("end", [SystemExit(0), SystemExit(3), ValueError("planted"), KeyboardInterrupt()])
def test_after_any_end_there_may_be_another(end: BaseException) -> None:
    with pytest.raises(type(end)), zt.ProgressReporter():
        raise end
    zt.ProgressReporter().close()


def released() -> bool:
    """Return whether a closed engine is freed while its reporter exists."""
    reporter = zt.ProgressReporter()
    reporter.stop_on_sigterm()
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=CONFIG)
    reporter.watch(engine)
    for _ in range(2):
        loss = engine(torch.ones(1, 2)).mean()
        engine.backward(loss)
        engine.step()
        reporter.step(loss)
    engine.close()
    held = weakref.ref(engine)
    del engine, loss, _
    gc.collect()
    return held() is None


@pytest.mark.ranks
def test_the_reporter_does_not_keep_the_engine() -> None:
    assert run_ranks(1, released) == [True]
