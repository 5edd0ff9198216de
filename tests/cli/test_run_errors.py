"""Errors of `zerotrain run`: code, cause, next step; no half-written files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.local_jobs import job_file, running, zerotrain
from zerotrain.client import ConfigSourceError, JobFileError, LocalRunError, load_job, local_run

BAD_GPT = {"dModel": 10, "heads": 3, "layers": 1, "context": 8}


def changed(job: Path, **spec: object) -> Path:
    data = json.loads(job.read_text())
    data["spec"] |= spec
    data["spec"] = {key: value for key, value in data["spec"].items() if value is not None}
    job.write_text(json.dumps(data, indent=1))
    return job


@pytest.mark.unit
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"workers": 0}, "spec.workers: Input should be greater than or equal to 1; got 0"),
        ({"command": None}, "must be given, unless command names a program of your own"),
        ({"config": None}, "exactly one of config, configFrom must be given"),
        ({"config": {"zero_optimisation": {"stage": 3}}}, "zero_optimization"),
        (
            {"config": None, "configFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            "spec.configFrom: the configuration is in ConfigMap c, which is not in this file",
        ),
        (
            {"command": None, "data": {"path": "/data"}, "model": {"gpt": BAD_GPT}},
            "spec.model.gpt.dModel: dModel must be a multiple of heads",
        ),
        (
            {"podTemplate": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}},
            "which only a cluster can look up",
        ),
    ],
)
def test_wrong_jobs_are_refused(tmp_path: Path, spec: dict[str, object], expected: str) -> None:
    job = changed(job_file(tmp_path), **spec)
    with pytest.raises((JobFileError, LocalRunError, ConfigSourceError)) as caught:
        local_run(load_job(job))
    assert expected in str(caught.value)
    assert str(job) in str(caught.value)


@pytest.mark.unit
@pytest.mark.parametrize("name", ["Gpt", "1gpt", "gpt-", "g" * 64])
def test_names_that_the_cluster_refuses_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobFileError, match=r"metadata\.name"):
        load_job(job_file(tmp_path, name=name))


@pytest.mark.ranks
def test_refusal_gives_code_cause_and_next_step_and_starts_nothing(tmp_path: Path) -> None:
    job = changed(job_file(tmp_path), workers=0)
    done = zerotrain("run", job, "--run-dir", tmp_path / "run")
    assert done.returncode == 64
    assert "error (64):" in done.stderr
    assert "next: correct" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_missing_file_is_named(tmp_path: Path) -> None:
    done = zerotrain("run", tmp_path / "nothing.yaml")
    assert done.returncode == 64
    assert "nothing.yaml:1: cannot be read" in done.stderr


@pytest.mark.ranks
def test_folder_that_cannot_be_written_is_the_users_to_correct(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = zerotrain("run", job_file(tmp_path), "--run-dir", tmp_path / "file" / "run")
    assert done.returncode == 66
    assert "--run-dir" in done.stderr


@pytest.mark.ranks
def test_folder_in_use_or_of_another_job_is_refused(tmp_path: Path) -> None:
    job, run_dir = job_file(tmp_path, steps=50_000), tmp_path / "run"
    with running(job, run_dir) as command:
        command.wait_for_step(1)
        second = zerotrain("run", job, "--run-dir", run_dir)
    assert second.returncode == 64
    assert "is in use by another" in second.stderr
    third = zerotrain("run", job_file(tmp_path, name="other"), "--run-dir", run_dir)
    assert "belongs to the job 'tiny'" in third.stderr


@pytest.mark.ranks
def test_ranks_data_and_variables_reach_the_ranks(tmp_path: Path) -> None:
    # One write for the line: a print is several, and a loaded machine may halt the rank between them.
    show = "sys.stdout.write(f\"{os.environ['WORLD_SIZE']} {os.environ['GREETING']}\\n\")"
    env = [{"name": "GREETING", "value": "hello"}]
    job = changed(job_file(tmp_path, show, steps=1), podTemplate={"env": env})
    done = zerotrain("run", job, "--run-dir", tmp_path / "run", "--ranks", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n3 hello\n" in done.stdout
    assert "[rank 2] 3 hello" in done.stdout


@pytest.mark.ranks
def test_data_given_on_the_command_line_replaces_the_jobs(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    job = changed(
        job_file(tmp_path),
        data={"path": "builtin:python-stdlib"},
        model={"gpt": {"dModel": 8, "heads": 2, "layers": 1, "context": 8}},
    )
    done = zerotrain("run", job, "--run-dir", tmp_path / "run", "--data", text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "train.json").read_text())["data_path"] == str(text)


@pytest.mark.unit
def test_the_volume_of_a_job_is_a_folder_of_the_run(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    text = """\
apiVersion: zerotrain.dev/v1alpha1
kind: ZeroTrainingJob
metadata: {name: gpt}
spec:
  workers: 1
  image: example.org/zerotrain:1
  model: {gpt: {dModel: 64, layers: 2, heads: 4, context: 64}}
  data: {path: "builtin:python-stdlib"}
  steps: 2
  nvme: {size: 1Gi, encryption: AEAD}
  config: {zero_optimization: {stage: 1, offload_optimizer: {device: nvme}}}
"""
    job.write_text(text)
    run = local_run(load_job(job))
    run.write_files(tmp_path / "run")
    launch = run.launch_spec(tmp_path / "run", attempt=1, master_port=1)
    assert launch.nvme_path is not None
    assert launch.nvme_path.is_dir()
    assert (launch.nvme_bytes, launch.nvme_encryption) == (2**30, "AEAD")
    assert launch.nvme_path.is_relative_to(tmp_path / "run")
