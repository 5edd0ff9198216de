"""Damage to the spill file of a training rank: a named error and its exit code, and no half update.

The last checkpoint is intact, and a run resumed from it ends as an undamaged one.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_spill import FAULTS, FOLDER_VARIABLE, VARIABLE, spill_descriptor
from tests.support.launcher import ROOT, launched
from tests.support.offloaded_params import Where, make, train
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import TEXT, TIMEOUT_S, TrainerRun, config, job, newest_digests
from tests.support.training import Case, world
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.checkpoint.names import committed
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.spill.seal import SpillIntegrityError
from zerotrain.runtime.train.exits import APPLICATION_FAILURE
from zerotrain.runtime.zero.state import MASTER

pytestmark = pytest.mark.ranks


STEPS, EVERY = 8, 2
FAULTY_CALL = 9
"""Number of a forward pass; with two per step, it is the first one of step 5."""

ERRORS = {"unreadable": "Input/output error", "truncate": "truncated", "unwritable": "File too large"}
INTEGRITY = (
    r"SpillIntegrityError: spill file of rank {rank}, offset \d+: chunk \d+ of unit '[^']+'.* failed "
    r"authentication"
)
IO = r"SpillIOError: the spill file of rank {rank}, unit '[^']+': .*{error}"


def spilling(folder: Path, *, params: bool, just_in_time: bool, ranks: int) -> dict[str, Any]:
    """Return a configuration with everything on nvme, or only the states."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), "just_in_time": just_in_time},
    }
    if params:
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0}
    return config(train_batch_size=4 * ranks, zero_optimization=zero)


class Attempts:
    """Runs of one job on one checkpoint folder."""

    def __init__(self, folder: Path, values: dict[str, Any], *, ranks: int) -> None:
        self.spill = folder / "spill"
        self.spill.mkdir(exist_ok=True)
        self._folder, self._values, self._ranks = folder, values, ranks
        self._job = job(
            steps=STEPS,
            checkpoint={"every_steps": EVERY, "keep_last": 10},
            model={"factory": "tests.support.faulty_spill:build", "factory_args": {}},
        )

    def run(self, name: str, *, attempt: int = 1, fault: str = "") -> TrainerRun:
        return TrainerRun(
            self._folder / f"{name}-{attempt}",
            self._job,
            config=self._values,
            world_size=self._ranks,
            attempt=attempt,
            checkpoint_dir=self._folder / name,
            env={VARIABLE: fault, FOLDER_VARIABLE: str(self.spill)},
        ).start()


def digests_at(checkpoints: Path, step: int) -> list[str]:
    (folder,) = [found.path for found in committed(checkpoints) if found.step == step]
    manifest = json.loads((folder / "manifest.json").read_text())
    return [entry["sha256"] for entry in manifest["files"]]


@pytest.mark.parametrize(
    ("params", "just_in_time", "ranks", "faults"),
    [
        (True, False, 2, ["flip", "unreadable"]),
        (True, True, 1, ["flip", "truncate"]),
        (False, False, 1, ["replay", "unwritable"]),
        (False, True, 2, ["flip"]),
    ],
)
def test_damage_ends_the_run_and_a_resume_is_exact(
    tmp_path: Path, params: bool, just_in_time: bool, ranks: int, faults: list[str]
) -> None:
    values = spilling(tmp_path / "spill", params=params, just_in_time=just_in_time, ranks=ranks)
    attempts = Attempts(tmp_path, values, ranks=ranks)
    attempts.run("straight").finish()
    expected = newest_digests(tmp_path / "straight")
    victim = ranks - 1
    for fault in faults:
        run = attempts.run(fault, fault=f"{fault}:{victim}:{FAULTY_CALL}")
        run.processes[victim].join(TIMEOUT_S)
        for process in run.processes:
            process.kill()  # the others wait for their peer, as there is no launcher to notify them
        is_integrity = fault in ("flip", "replay")
        code = ExitCode.SPILL_INTEGRITY if is_integrity else APPLICATION_FAILURE
        assert run.wait()[victim] == code, run.log(victim)
        last = run.log(victim).splitlines()[-1]
        if is_integrity:
            assert re.match(INTEGRITY.format(rank=victim), last), last
        else:
            assert re.match(IO.format(rank=victim, error=ERRORS[fault]), last), last
        assert sorted(found.step for found in committed(tmp_path / fault)) == [2, 4]
        assert digests_at(tmp_path / fault, 4) == digests_at(tmp_path / "straight", 4)
        again = attempts.run(fault, attempt=2)
        assert "resumed from step 4" in again.finish()
        assert newest_digests(tmp_path / fault) == expected
    assert list(attempts.spill.iterdir()) == []


def test_the_launcher_ends_with_the_code_and_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container ends so: the operator reads the code, users read the message."""
    spill = tmp_path / "spill"
    spill.mkdir()
    values = spilling(spill, params=True, just_in_time=True, ranks=1)
    (tmp_path / "data.txt").write_text(TEXT)
    spec = job(
        data_path=str(tmp_path / "data.txt"),
        steps=STEPS,
        checkpoint={"every_steps": EVERY, "keep_last": 10},
        model={"factory": "tests.support.faulty_spill:build", "factory_args": {}},
    )
    (tmp_path / "train.json").write_text(json.dumps(spec))
    (tmp_path / "ds_config.json").write_text(json.dumps(values))
    monkeypatch.setenv(VARIABLE, f"flip:0:{FAULTY_CALL}")
    monkeypatch.setenv(FOLDER_VARIABLE, str(spill))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with launched(
        tmp_path,
        "",
        ranks=1,
        command=[sys.executable, "-m", "zerotrain.runtime.train"],
        train_spec_path=tmp_path / "train.json",
        checkpoint_dir=tmp_path / "checkpoints",
    ) as launcher:
        output, _ = launcher.popen.communicate(timeout=TIMEOUT_S)
        assert launcher.popen.returncode == ExitCode.SPILL_INTEGRITY, output.decode()
        ending = launcher.termination
        assert (ending.code, ending.rank) == (ExitCode.SPILL_INTEGRITY, 0)
        assert ending.exception is not None
        assert re.match(INTEGRITY.format(rank=0), ending.exception), ending.exception
    assert sorted(found.step for found in committed(tmp_path / "checkpoints")) == [2, 4]


def test_a_spill_that_does_not_fit_ends_before_anything_is_written(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    values = spilling(spill, params=True, just_in_time=False, ranks=1)
    values["zero_optimization"]["spill"] = {"max_bytes": 100_000}
    attempts = Attempts(tmp_path, values, ranks=1)
    run = attempts.run("small")
    assert run.wait() == [ExitCode.DOES_NOT_FIT]
    assert "0.1 MiB are allowed" in run.log(0).splitlines()[-1]
    assert list(spill.iterdir()) == []
    assert committed(tmp_path / "small") == []


def lose_weights(folder: str) -> None:
    """Check that the states in host memory are those of the last whole step, and cannot be saved."""
    os.environ[FOLDER_VARIABLE] = folder
    case = Case(stage=3, dtype="bf16", torch_adam=False, clip=0.3)
    reference = make(case, Where(params="cpu", states="cpu"), folder)
    train(reference, case, 2)
    expected = host_states(reference)
    reference.close()
    engine = make(case, Where(params="nvme", states="cpu", just_in_time=False), folder)
    train(engine, case, 2)
    FAULTS["flip"](spill_descriptor(), b"")
    with pytest.raises(SpillIntegrityError) as caught:
        train(engine, case, 1, first=2)
    for call in (lambda: engine.save_checkpoint(Path(folder) / "c"), lambda: train(engine, case, 1)):
        with pytest.raises((SpillIntegrityError, RuntimeError)):
            call()
    assert caught.value.rank == world()[0]
    assert caught.value.unit.endswith(" (weights)")
    assert host_states(engine) == expected
    assert not list((Path(folder) / "c").glob("*/manifest.json"))


def host_states(engine: Engine) -> dict[str, bytes]:
    return {
        f"{name}/{kind}": states.read(kind).cpu().numpy().tobytes()
        for name, states in engine.optimizer.states.items()
        for kind in (MASTER, *states.kinds)
    }


def test_no_update_is_lost_or_made_twice_by_lost_weights(tmp_path: Path) -> None:
    run_ranks(1, lose_weights, str(tmp_path))
