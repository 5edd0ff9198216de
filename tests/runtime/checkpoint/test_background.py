"""Saves that run while the model trains: they have the bytes of the moment of the call.

Every rank gets their errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import background_saves
from tests.support.checkpoint_engines import make_engine, train
from tests.support.factory_models import build
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import newest_digests
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime import checkpoint
from zerotrain.runtime.checkpoint import SingleRank
from zerotrain.runtime.initialization import initialize

pytestmark = pytest.mark.ranks


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_are_those_of_the_step_of_the_save(tmp_path: Path, stage: int) -> None:
    run_ranks(2, background_saves.saved_at_once, str(tmp_path / "sync"), stage)
    results = run_ranks(2, background_saves.saved_while_training, str(tmp_path / "async"), stage)
    assert newest_digests(tmp_path / "async") == newest_digests(tmp_path / "sync")
    for result in results:
        assert result["before"] is None
        assert result["promised"] == (False, 2, "step-0000000002-attempt-1")
        assert result["durable"] == (True, 2, "step-0000000002-attempt-1")
        assert result["formula"] == result["streams"]
        assert result["streams"] <= result["copied"] < result["streams"] + 20_000  # generators, buffers
        assert result["kept"] == result["copied"]
        assert result["left"] == 0
        assert result["waited"] is None


@pytest.mark.parametrize("raised_by", ["step", "wait", "save", "load", "close"])
def test_a_full_disk_in_the_background_is_raised_on_every_rank(tmp_path: Path, raised_by: str) -> None:
    expected = (
        "CheckpointNoSpace",
        int(ExitCode.CHECKPOINT_UNUSABLE),
        "['fence.json', 'fence.lock', 'latest', 'step-0000000001-attempt-1']",
    )
    found = run_ranks(2, background_saves.fails_on_one_rank, str(tmp_path), raised_by)
    # Rank 0 clears up before it raises; another rank may look while it does.
    assert [item[:2] for item in found] == [expected[:2]] * 2
    assert found[0] == expected


def test_the_fence_holds_for_the_background(tmp_path: Path) -> None:
    assert run_ranks(2, background_saves.loses_the_folder, str(tmp_path)) == ["CheckpointFenced"] * 2
    assert not list(tmp_path.glob("step-*"))


def test_state_without_a_durable_form_is_refused_at_once(tmp_path: Path) -> None:
    for text in run_ranks(2, background_saves.cannot_be_stored, str(tmp_path)):
        assert "client_state.rng[1].x is of type object" in text


def test_saves_and_loads_wait_for_the_one_before(tmp_path: Path) -> None:
    expected = ["step-0000000002-attempt-1", "step-0000000002-attempt-1", "2"]
    assert run_ranks(2, background_saves.saves_twice, str(tmp_path)) == [expected] * 2


def test_the_configuration_asks_for_it(tmp_path: Path) -> None:
    """The key is DeepSpeed's; an argument of the call takes precedence."""
    config = {"train_batch_size": 8, "checkpoint": {"writer": {"type": "fast", "decoupled": True}}}
    engine = initialize(model=build(), config=config)[0]
    train(engine, 1)
    assert engine.save_checkpoint(tmp_path, asynchronous=False).durable
    assert not engine.save_checkpoint(tmp_path, "second").durable
    found = engine.wait_for_checkpoint()
    assert found is not None
    assert (found.durable, found.path) == (True, tmp_path / "second")
    assert 0.0 < found.stall_seconds < found.seconds
    engine.close()


def test_a_process_that_ends_without_close_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tests.support.checkpoint_engines import make_engine, train\n"
        "engine = make_engine(world_size=1)\n"
        "train(engine, 1)\n"
        "engine.save_checkpoint(sys.argv[1], asynchronous=True)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    engine = make_engine(world_size=1)
    loaded = checkpoint.load(engine.checkpoint_state(), tmp_path, group=SingleRank())
    assert loaded.step == 1
    engine.close()
