"""Trainer checkpoints of a job: whole or not there, whenever a rank is killed and whoever else still
writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.hf_jobs import run_attempt
from tests.support.hf_scripts import Losses, ScriptFailed

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "scripts" / "job_trainer.py"


def attempt(
    tmp_path: Path,
    number: int,
    *,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    **arguments: object,
) -> list[Losses]:
    """Run one attempt of a job in its folder; return what each rank recorded. Raises ScriptFailed."""
    given = json.dumps({"save_steps": 2, **arguments})
    return run_attempt(tmp_path, number, SCRIPT, "--arguments", given, ranks=ranks, environment=environment)


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "job" / "script" / "out").iterdir())


def test_at_every_point_of_a_save_another_attempt_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "points"
    attempt(tmp_path, 1, ranks=1, environment={"INSPECT": str(log)}, save_total_limit=1)
    points = [json.loads(line) for line in log.read_text().splitlines()]
    touched = [name for name, _, _ in points]
    for name in ("model.safetensors", "rng_state.pth", "trainer_state.json", "COMMIT", "zerotrain.json"):
        assert touched.count(name) >= 3, f"each of three saves writes {name}"
    assert [torn for _, _, torn in points if torn] == []
    chosen = [found for _, found, _ in points]
    first = chosen.index("checkpoint-2")
    assert chosen == sorted(chosen, key=lambda found: found or ""), "it never goes back"
    assert None not in chosen[first:]
    assert names(tmp_path) == ["checkpoint-6"]


def test_another_number_of_ranks_sees_the_same_samples_in_each_step(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole", 1)
    with pytest.raises(ScriptFailed):
        attempt(tmp_path, 1, environment={"KILL_POINT": "0:4:model.safetensors"})
    (alone,) = attempt(tmp_path, 2, ranks=1)
    assert len(alone.losses) == 2 * 4, "four steps of two micro-batches"
    for step in range(4):
        expected = sum(rank.losses[2 + step] for rank in whole) / 2
        assert sum(alone.losses[2 * step : 2 * step + 2]) == pytest.approx(expected, abs=1e-5)


def test_an_attempt_after_the_last_step_takes_none(tmp_path: Path) -> None:
    attempt(tmp_path, 1)
    (first, second) = attempt(tmp_path, 2)
    assert first.losses == second.losses == []
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_is_uploaded_from_its_place(tmp_path: Path) -> None:
    log = tmp_path / "pushed"
    given = json.dumps({"push_to_hub": True, "hub_strategy": "all_checkpoints", "max_steps": 2})
    run_attempt(tmp_path, 1, SCRIPT, "--arguments", given, "--pushed", str(log), ranks=1)
    ((folder, content),) = [json.loads(line) for line in log.read_text().splitlines()]
    assert Path(folder) == tmp_path / "job" / "script" / "out" / "checkpoint-2"
    assert "zerotrain.json" in content


POINTS = ("0:4:model.safetensors", "1:4:rng_state_1.pth", "0:4:zerotrain.json", "0:4:checkpoint-4")


@pytest.mark.slow(cheaper="tests/compat/test_folders.py::test_a_late_writer_completes_nothing")
def test_losses_after_a_kill_are_those_of_a_run_without(tmp_path: Path) -> None:
    whole = attempt(tmp_path / "whole", 1)
    assert len(whole[0].losses) == 6
    for number, point in enumerate(POINTS):
        folder = tmp_path / str(number)
        with pytest.raises(ScriptFailed):
            attempt(folder, 1, environment={"KILL_POINT": point})
        assert names(folder) == ["checkpoint-2"]
        again = attempt(folder, 2)
        assert [rank.losses for rank in again] == [rank.losses[2:] for rank in whole], point
        assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
