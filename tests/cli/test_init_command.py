"""`zerotrain init`: the written file is valid and planned; it replaces nothing, and asks only on a
terminal.
"""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.local_jobs import COMMAND, environment
from zerotrain.cli.errors import CliError
from zerotrain.cli.main import app
from zerotrain.client.jobfile import load_job
from zerotrain.operator.api.planning import plan_job
from zerotrain.operator.api.validation import refusals


def init(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["init", str(file), "--yes", *options])


LARGE = (
    "--model",
    "/models/llama",
    "--parameters",
    "70B",
    "--gpus",
    "8",
    "--gpu",
    "H100",
    "--micro-batch",
    "1",
)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "stage", "optimizer"),
    [
        (("--memory", "16Gi"), 0, None),
        (("--model", "gpt-125m", "--gpus", "8", "--gpu", "H100"), 0, None),
        ((*LARGE, "--workers", "4", "--memory", "1800Gi"), 3, None),
        ((*LARGE, "--workers", "1", "--memory", "1800Gi"), 3, "cpu"),
        ((*LARGE, "--workers", "1", "--memory", "400Gi", "--nvme", "4Ti"), 3, "nvme"),
        (("--model", "a.b:c", "--workers", "2", "--gpus", "1"), 3, None),
        (("--stage", "2", "--offload", "cpu", "--gpus", "1", "--workers", "2"), 2, "cpu"),
    ],
)
def test_the_planner_chooses_and_agrees(
    tmp_path: Path, options: tuple[str, ...], stage: int, optimizer: str | None
) -> None:
    file = tmp_path / "my-job.yaml"
    done = init(file, *options)
    assert done.exit_code == 0, done.output
    spec = load_job(file).job.spec
    assert refusals(spec) == ()
    assert spec.config is not None
    zero = spec.config["zero_optimization"]
    assert (zero["stage"], zero.get("offload_optimizer", {}).get("device")) == (stage, optimizer)
    assert ("bf16" in spec.config) is ("--gpus" in options)
    assert str(plan_job(spec).verdict) in ("Fits", "Tight", "Unknown")
    text = file.read_text()
    assert "# A DeepSpeed-style configuration" in text
    assert f"# stage {stage}" in text


@pytest.mark.unit
def test_a_job_that_cannot_fit_is_written_and_refused_with_the_way_out(tmp_path: Path) -> None:
    done = init(tmp_path / "j.yaml", *LARGE, "--memory", "100Gi")
    assert done.exit_code == 67
    assert "Does not fit, by the memory planner" in (tmp_path / "j.yaml").read_text()


@pytest.mark.unit
def test_nothing_is_overwritten_unless_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("mine")
    done = init(file)
    assert isinstance(done.exception, CliError)
    assert "--force" in str(done.exception.next_step)
    assert file.read_text() == "mine"
    assert init(file, "--force").exit_code == 0
    assert load_job(file).job.name == "job"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "nope"), "gpt-125m"),
        (("--model", "gpt:10x2x3x8"), "multiple of the heads"),
        (("--name", "Bad_Name"), "lower-case"),
        (("--data", "relative/path"), "absolute path"),
        (("--gpus", "1", "--gpu", "TPU"), "known are"),
        (("--memory", "lots"), "spec.resources.memory"),
        (("--parameters", "x", "--model", "/m/x"), "--parameters"),
        (("--offload", "cpu"), "--stage"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = init(tmp_path / "j.yaml", *options)
    assert isinstance(done.exception, CliError)
    assert words in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_a_terminal_is_asked_and_may_answer_again(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    popen = subprocess.Popen(
        [*COMMAND, "init", "asked.yaml"],
        cwd=tmp_path,
        env=environment(TERM="dumb", NO_COLOR="1"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    # model (twice: the first is wrong), gpus, name, image, data, steps, workers, memory, batch, claim
    os.write(ours, b"nonsense\ngpt-1m\n0\n\n\n\n50\n2\n4Gi\n4\n\n")
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        output += chunk
        if not chunk:
            break
    os.close(ours)
    assert popen.wait(60) == 0, output.decode()
    assert "is no model" in output.decode()
    spec = load_job(tmp_path / "asked.yaml").job.spec
    assert (spec.workers, spec.steps, spec.world_size) == (2, 50, 2)
    assert spec.model is not None
    assert spec.model.preset == "gpt-1m"
