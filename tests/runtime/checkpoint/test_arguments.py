"""DeepSpeed's arguments of save and load, and saves at unusual moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import partial_loads
from tests.support.ranks import run_ranks
from tests.support.resized_engines import make

pytestmark = pytest.mark.ranks


def test_what_each_argument_takes_over(tmp_path: Path) -> None:
    for found in run_ranks(2, partial_loads.load_parts, str(tmp_path)):
        everything = {
            "same weights": True,
            "has moments": True,
            "steps": 3,
            "updates": 3,
            "schedule": 3,
            "client": {"epoch": 1},
            "own generators": False,
        }
        module = {
            "same weights": True,
            "has moments": False,
            "steps": 0,
            "updates": 0,
            "schedule": 0,
            "client": {"epoch": 1},
            "own generators": True,
        }
        assert found["everything"] == everything
        assert found["module"] == module
        assert found["no optimizer"] == {**everything, "has moments": False, "updates": 0}
        assert found["no schedule"] == {**everything, "schedule": 0}


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    for found in run_ranks(2, partial_loads.without_frozen, str(tmp_path)):
        assert "holds no parameter 'base.bias'" in found["refused"]
        assert "load_module_strict False" in found["refused"]
        assert found["frozen kept"]
        assert found["trained loaded"]


def test_unusual_moments(tmp_path: Path) -> None:
    for found in run_ranks(2, partial_loads.saves_between_steps, str(tmp_path)):
        assert found["initial"]
        assert found["again"]
        assert found["step"] == 0
        assert found["latest"] == "step-0000000000-attempt-1"
        assert found["hidden"] == 1
        assert "inside gradient accumulation would lose gradients (micro-batch 1 of 1)" in found["between"]
        assert "rank 1 saves under another tag or step than rank 0" in found["tags"]
        assert found["left"] == []
        assert found["none"] == (None, {})


def test_a_load_that_finds_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("AdamW", 0)
    assert engine.load_checkpoint(tmp_path / "empty") == (None, {})
    assert caplog.messages == [f"{tmp_path / 'empty'} holds no checkpoints, so nothing was loaded"]
    saved = engine.save_checkpoint(tmp_path, tag="first").path
    assert engine.load_checkpoint(saved) == (None, {})
    assert caplog.messages[1].endswith(f"itself: load_checkpoint({str(tmp_path)!r}, tag='first')")
    assert engine.load_checkpoint(tmp_path, tag="first")[0] == saved
    assert len(caplog.messages) == 2
    engine.close()


def test_a_load_function_of_ones_own_is_refused(tmp_path: Path) -> None:
    engine = make("AdamW", 0)
    with pytest.raises(ValueError, match=r"custom_load_fn must be None: .* full_parameters"):
        engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)  # type: ignore[arg-type]
    engine.close()
