"""The command line as a whole: help, version, explain, config show, the terminal's progress bar."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.local_jobs import COMMAND, environment, job_file, zerotrain
from zerotrain.cli.local.view import PlainView, TerminalView, facts, view_for
from zerotrain.contract.exit_codes import EXIT_CODES
from zerotrain.contract.progress import CheckpointProgress, Phase, Progress
from zerotrain.contract.worker_http import WorkerReport

pytestmark = pytest.mark.ranks


def report(step: int) -> WorkerReport:
    durable = CheckpointProgress(step=2, path="/c/2", time=1.0)
    ranks = tuple(
        Progress(
            rank=rank,
            attempt=2,
            phase=Phase.STEP,
            step=step + rank,
            total_steps=10,
            loss=2.5,
            tokens_per_second=1234.0,
            checkpoint=durable,
        )
        for rank in (0, 1)
    )
    return WorkerReport(job="j", job_uid="u", attempt=2, node_rank=0, world_size=2, ranks=ranks)


@pytest.mark.parametrize("command", [[], ["run"], ["version"], ["config", "show"], ["explain", "exit-codes"]])
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    done = zerotrain(*command, "--help")
    assert done.returncode == 0
    assert not command or "Example: zerotrain" in " ".join(done.stdout.split())


def test_no_command_but_run_loads_torch_or_kopf() -> None:
    imports = "import sys, zerotrain.cli.main, zerotrain.cli.local.attempts"
    code = f"{imports}; print({{'torch', 'kopf'}} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


def test_version_names_what_a_report_needs() -> None:
    lines = zerotrain("version").stdout.split("\n")
    assert [line.split()[0] for line in lines if line] == [
        "zerotrain",
        "torch",
        "kopf",
        "kubernetes",
        "python",
    ]


def test_explain_prints_every_row_of_the_table() -> None:
    out = zerotrain("explain", "exit-codes", COLUMNS="200").stdout
    for row in EXIT_CODES:
        assert any(line.split()[:2] == [str(row.code), row.name] for line in out.splitlines()), row.code


def test_config_show_gives_value_origin_and_effect(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_batch_size": 16, "zero_optimization": {"stage": 2}, /* ours */ "bf16": {"enabled": true},}'
    )
    done = zerotrain("config", "show", file, "--world-size", "4", COLUMNS="250")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines() if line}
    assert rows["zero_optimization.stage"] == ["2", "file"]
    assert rows["train_batch_size"] == ["16", "file"]
    assert rows["train_micro_batch_size_per_gpu"] == ["4", "derived"]


def test_config_show_loads_a_file_that_asks_for_what_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"tp_size": 8}}')
    done = zerotrain("config", "show", file, COLUMNS="250")
    assert done.returncode == 0
    assert re.search(r"tensor_parallel.tp_size +8 +file +not run", done.stdout)
    assert "not run: tensor_parallel.tp_size: " in done.stdout


def test_config_show_reads_a_job_file_and_refuses_a_wrong_key(tmp_path: Path) -> None:
    job = job_file(tmp_path, config={"train_micro_batch_size_per_gpu": 3})
    done = zerotrain("config", "show", job.rename(tmp_path / "job.yml"), COLUMNS="250")
    assert (
        "6" in next(line for line in done.stdout.splitlines() if line.startswith("train_batch_size")).split()
    )
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimisation": {}}')
    done = zerotrain("config", "show", file)
    assert (done.returncode, "zero_optimization" in done.stderr) == (64, True)


def test_facts_of_the_bar() -> None:
    assert facts(report(4)) == "loss 2.500 · 1,234 tokens/s · checkpoint 2 · attempt 2"


def test_terminal_gets_a_bar_and_a_pipe_gets_lines() -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=120)
    with view_for(terminal, total_steps=10) as view:
        assert isinstance(view, TerminalView)
        view.update(report(4))
        view.line("[rank 1] step 4")
    assert "4/10" in stream.getvalue()
    assert "[rank 1] step 4" in stream.getvalue()
    with view_for(Console(file=io.StringIO()), total_steps=10) as view:
        assert isinstance(view, PlainView)


@pytest.mark.parametrize(("no_color", "colours"), [("1", False), ("", True)])
def test_bar_on_a_real_terminal_honours_no_color(tmp_path: Path, no_color: str, colours: bool) -> None:
    ours, theirs = pty.openpty()
    job = job_file(tmp_path)
    popen = subprocess.Popen(
        [*COMMAND, "run", str(job), "--run-dir", str(tmp_path / "run")],
        env=environment(NO_COLOR=no_color, TERM="xterm-256color", COLUMNS="140"),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(ours)
    assert popen.wait(60) == 0
    text = output.decode()
    assert "5/5" in text
    assert ("\x1b[38;" in text or "\x1b[1;32m" in text or "\x1b[32m" in text) == colours
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"job": "tiny", "attempt": 1}
