"""Every way in which a job can be wrong ends with its own code and a text that names what to edit."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_runs import TIMEOUT_S, TrainerRun, config, job
from zerotrain.contract.exit_codes import NEVER_RETRIED, ExitCode
from zerotrain.runtime.train.exits import APPLICATION_FAILURE, exit_code_of

pytestmark = pytest.mark.ranks


Make = Callable[[Path], TrainerRun]


def _job(**changes: Any) -> Make:
    return lambda folder: TrainerRun(folder, job(**changes))


def _config(**changes: Any) -> Make:
    return lambda folder: TrainerRun(folder, job(), config=config(**changes))


def _model(model: dict[str, Any]) -> Make:
    return _job(model=model)


def _empty_data(folder: Path) -> TrainerRun:
    folder.mkdir()
    (folder / "empty.txt").touch()
    return TrainerRun(folder, job(data_path=str(folder / "empty.txt")))


def _short_data(folder: Path) -> TrainerRun:
    folder.mkdir()
    (folder / "short.txt").write_text("hi")
    return TrainerRun(folder, job(data_path=str(folder / "short.txt")))


def _checkpoints_in_a_file(folder: Path) -> TrainerRun:
    folder.mkdir()
    (folder / "file").touch()
    return TrainerRun(folder, job(), checkpoint_dir=folder / "file")


def _no_train_spec(folder: Path) -> TrainerRun:
    return TrainerRun(folder, job(), env={"ZEROTRAIN_TRAIN_SPEC": ""})


def _no_config_file(folder: Path) -> TrainerRun:
    return TrainerRun(folder, job(), env={"ZEROTRAIN_CONFIG": str(folder / "nowhere.json")})


def _rank_is_no_number(folder: Path) -> TrainerRun:
    return TrainerRun(folder, job(), env={"RANK": "one"})


FACTORY = "tests.support.factory_models:"
CASES: dict[str, tuple[Make, ExitCode, str]] = {
    "config key": (_config(zero_optimisation={}), ExitCode.BAD_CONFIG, "zero_optimization"),
    "config not run": (_config(tensor_parallel={"tp_size": 8}), ExitCode.BAD_CONFIG, "tensor_parallel"),
    "job key": (_job(stepz=3), ExitCode.BAD_CONFIG, "stepz is not a key"),
    "job value": (_job(steps=0), ExitCode.BAD_CONFIG, "steps must be at least 1; got 0"),
    "data missing": (_job(data_path="/nowhere"), ExitCode.BAD_DATA, "/nowhere does not exist"),
    "data empty": (_empty_data, ExitCode.BAD_DATA, "empty.txt is empty"),
    "data short": (_short_data, ExitCode.BAD_DATA, "has 3 tokens but one sample needs 9"),
    "checkpoint folder": (_checkpoints_in_a_file, ExitCode.CHECKPOINT_UNUSABLE, os.strerror(errno.EEXIST)),
    "preset": (_model({"preset": "gpt-9z"}), ExitCode.BAD_MODEL, "take one of gpt-1m"),
    "path": (_model({"path": "/models/llama"}), ExitCode.BAD_MODEL, "/models/llama has no config.json"),
    "factory module": (_model({"factory": "no.such:build"}), ExitCode.BAD_MODEL, "No module named 'no'"),
    "factory name": (_model({"factory": f"{FACTORY}nothing"}), ExitCode.BAD_MODEL, "has no 'nothing'"),
    "factory form": (_model({"factory": "build"}), ExitCode.BAD_MODEL, "must be `package.module:function`"),
    "factory raises": (
        _model({"factory": f"{FACTORY}build_badly"}),
        ExitCode.BAD_MODEL,
        "KeyError: \"the user's",
    ),
    "factory returns": (_model({"factory": f"{FACTORY}build_nothing"}), ExitCode.BAD_MODEL, "got str"),
    "launch": (_no_train_spec, ExitCode.BAD_LAUNCH, "needs its training part"),
    "rank": (_rank_is_no_number, ExitCode.BAD_LAUNCH, "RANK='one' is not a whole number"),
    "config file": (_no_config_file, ExitCode.BAD_LAUNCH, "nowhere.json cannot be read"),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_job_is_never_retried(tmp_path: Path, name: str) -> None:
    make, code, message = CASES[name]
    run = make(tmp_path / "run").start()
    assert run.wait() == [code], run.log(0)
    assert int(code) in NEVER_RETRIED
    assert message in run.log(0)
    # The last line is what the operator shows.
    assert message in run.log(0).splitlines()[-1]


def test_lost_weights_end_the_run_as_diverged_and_are_never_saved(tmp_path: Path) -> None:
    spec = job(steps=50, checkpoint={"every_steps": 1})
    spec["model"]["factory_args"] = {"poison": True}
    run = TrainerRun(tmp_path / "run", spec, world_size=2, checkpoint_dir=tmp_path / "c").start()
    assert run.wait() == [ExitCode.DIVERGED, ExitCode.DIVERGED]
    assert "the loss was not finite for 5 steps up to step 5" in run.log(0)
    assert not list((tmp_path / "c").glob("step-*"))


def test_updates_that_are_always_skipped_end_the_run_as_diverged(tmp_path: Path) -> None:
    spec = job(steps=50)
    spec["model"]["factory_args"] = {"poison": "gradient"}
    run = TrainerRun(tmp_path / "run", spec, world_size=2).start()
    assert run.wait() == [ExitCode.DIVERGED, ExitCode.DIVERGED]
    assert "the gradient was not finite for 5 steps up to step 5" in run.log(0)


def test_last_loss_must_be_finite(tmp_path: Path) -> None:
    spec = job(steps=2, checkpoint={"every_steps": 1})
    spec["model"]["factory_args"] = {"poison": True}
    run = TrainerRun(tmp_path / "run", spec, checkpoint_dir=tmp_path / "c").start()
    assert run.wait() == [ExitCode.DIVERGED]
    assert "the loss was not finite at the end, step 2" in run.log(0)
    assert not list((tmp_path / "c").glob("step-*"))


def test_stop_right_after_a_lost_loss_claims_no_checkpoint(tmp_path: Path) -> None:
    """The signal comes while the first step runs, whose loss is not finite."""
    spec = job(steps=50)
    spec["model"]["factory_args"] = {"poison": True, "step_seconds": 0.5}
    run = TrainerRun(tmp_path / "run", spec, checkpoint_dir=tmp_path / "c").start()
    run.wait_for("training ")
    run.signal(0, signal.SIGTERM)
    assert run.wait() == [ExitCode.TERMINATED], run.log(0)
    assert "without saving: the loss was not finite" in run.log(0)


def test_missing_peer_is_a_rendezvous_timeout(tmp_path: Path) -> None:
    for rank in (0, 1):
        run = TrainerRun(
            tmp_path / str(rank),
            job(),
            world_size=2,
            env={"ZEROTRAIN_RENDEZVOUS_TIMEOUT_SECONDS": "1"},
        ).start(range(rank, rank + 1))
        assert run.wait() == [ExitCode.RENDEZVOUS_TIMEOUT]
        assert f"rank {rank} did not meet all 2 ranks at 127.0.0.1" in run.log(rank)
        assert f"or another program on port {run.port}" in run.log(rank)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_disk_that_fills_up_ends_all_ranks(tmp_path: Path, asynchronous: bool) -> None:
    """Rank 1 hits a file size limit in its first checkpoint; rank 0, which could write, ends alike."""
    spec = job(steps=50, checkpoint={"every_steps": 2, "asynchronous": asynchronous})
    spec["model"]["factory_args"] = {"width": 128}
    run = TrainerRun(
        tmp_path / "run", spec, world_size=2, checkpoint_dir=tmp_path / "c", file_limits={1: 65536}
    )
    assert run.start().wait() == [ExitCode.CHECKPOINT_UNUSABLE, ExitCode.CHECKPOINT_UNUSABLE]
    for rank in (0, 1):
        assert "CheckpointNoSpace" in run.log(rank)
        assert "rank 1 cannot write (the file size limit has no space left" in run.log(rank)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["fence.json", "fence.lock", "history"]


def test_unknown_failures_are_the_applications() -> None:
    assert exit_code_of(ZeroDivisionError()) == APPLICATION_FAILURE
    assert exit_code_of(RuntimeError("size mismatch")) == APPLICATION_FAILURE
    assert exit_code_of(OSError(errno.EIO, "")) == APPLICATION_FAILURE


def test_lack_of_memory_does_not_fit() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    for error in (MemoryError(), OSError(errno.ENOMEM, ""), caught.value):
        assert exit_code_of(error) == ExitCode.DOES_NOT_FIT, error


@pytest.mark.parametrize(("first", "code"), [(1, ExitCode.DOES_NOT_FIT), (20, APPLICATION_FAILURE)])
def test_what_fitted_for_a_step_may_fit_again(tmp_path: Path, first: int, code: int) -> None:
    """A job without memory in its first step cannot run; later the operator retries within a budget."""
    spec = job(steps=50)
    spec["model"]["factory_args"] = {"no_memory_from": first}
    run = TrainerRun(tmp_path / "run", spec).start()
    assert run.wait() == [code], run.log(0)
    assert run.log(0).splitlines()[-1].startswith("OutOfMemoryError: CUDA out of memory")


def test_progress_and_metrics_reach_the_channel(tmp_path: Path) -> None:
    """The test plays the launcher's side of the socket."""
    import socket

    path = tmp_path / "channel.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        run = TrainerRun(
            tmp_path / "run",
            job(steps=4),
            checkpoint_dir=tmp_path / "c",
            env={"ZEROTRAIN_CHANNEL_SOCKET": str(path)},
        ).start()
        server.settimeout(TIMEOUT_S)
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            messages = [json.loads(line) for line in lines]
        run.finish()
    last = [message["progress"] for message in messages if message["kind"] == "progress"][-1]
    assert (last["phase"], last["step"], last["total_steps"]) == ("done", 4, 4)
    assert last["checkpoint"]["step"] == 4
    assert last["loss"] == pytest.approx(float(run.losses()[4]), abs=1e-4)
    families = [message["families"] for message in messages if message["kind"] == "metrics"][-1]
    samples = {sample[0]: sample[2] for family in families for sample in family["samples"]}
    assert samples["zerotrain_step"] == 4.0
    assert samples["zerotrain_tokens_total"] == 4 * 8 * 8
