"""The GPU check runs without a GPU: its parts on small sizes, its limits, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as check
from tests.gpu.__main__ import ROOT, Part, environment_of_parts, run
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.ranks


def rows(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the lines of JSON that a script of the check prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment_of_parts(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_engines_step_in_a_world_of_eight() -> None:
    first, second = rows("tests.gpu.fake_world", "8", "fsdp2", "zerotrain-3+qwz+qgz")
    assert (first["contender"], first["world"], first["of_first"]) == ("fsdp2", 8, 1.0)
    assert second["contender"] == "zerotrain-3+qwz+qgz"
    assert second["step_ms"] >= second["host_ms"] > 0.0


@pytest.mark.parametrize(
    "kinds", with_slow_rows(["+fp8+split +muon", "+compile"], quick=["+fp8+split +muon"])
)
def test_other_kinds_of_steps_are_measured(kinds: str) -> None:
    names = [f"zerotrain-3{kind}" for kind in ("", *kinds.split())]
    found = rows("tests.gpu.fake_world", "8", *names)
    assert [row["contender"] for row in found] == names


def test_two_ranks_have_the_losses_of_one() -> None:
    trained, kept = rows("tests.gpu.two_ranks", "zerotrain-2")
    assert trained["largest_difference"] < 1e-3
    assert kept == {"contender": "kept buffers", "skipped": "no GPU"}


def test_products_in_fp8_are_compared_and_timed() -> None:
    found = rows("tests.gpu.fp8")
    assert all(row["codes_equal"] and row["off"] == 0.0 for row in found if "product" in row)
    timed = [row for row in found if "contender" in row]
    assert [row["contender"] for row in timed][:3] == ["bf16", "rowwise", "tensorwise"]
    assert all(row["step_ms"] > 0.0 for row in timed)
    compiled = [row for row in found if "compiled" in row]
    assert [row["codes_off"] + row["scales_off"] for row in compiled] == [0.0, 0.0]


def test_small_costs_are_beside_the_way_it_was() -> None:
    found = rows("tests.gpu.small_costs")
    assert [row["row"].split()[0] for row in found] == ["moved", "joined", "save"]
    assert all(row["ms"] > 0.0 and row["spread"][0] <= row["ratio"] <= row["spread"][1] for row in found)


def test_tests_of_the_check_need_no_package_of_the_operator() -> None:
    """A machine with a GPU may have no more than torch and pytest."""
    hidden = "pydantic", "cryptography", "ruamel", "kubernetes", "kopf", "transformers"
    collected = ["--collect-only", "-q", "-p", "no:cacheprovider", *check.TESTS]
    program = f"import sys; sys.modules |= dict.fromkeys({hidden}); import pytest; pytest.main({collected})"
    done = subprocess.run(python(program), cwd=ROOT, capture_output=True, text=True, check=False)
    assert " tests collected" in done.stdout, done.stdout + done.stderr


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_part_reports_its_rows_and_keeps_its_output(tmp_path: Path) -> None:
    part = Part(name="two rows", half=1, limit_s=60, command=python("print('a'); print('{\"step_ms\": 1}')"))
    found = run(part, environment_of_parts(), tmp_path)
    assert (found["outcome"], found["rows"]) == ("passed", [{"step_ms": 1}])
    assert (tmp_path / "two-rows.txt").read_text() == 'a\n{"step_ms": 1}\n'


def test_a_part_that_fails_shows_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part(name="bad", half=1, limit_s=60, command=python("raise SystemExit('no such kernel')"))
    assert run(part, environment_of_parts(), tmp_path)["outcome"] == "exit code 1"
    assert "no such kernel" in capsys.readouterr().out


def test_a_part_ends_at_its_limit_with_its_processes(tmp_path: Path) -> None:
    """A rank that it started would keep the GPU's memory."""
    alive = tmp_path / "alive"
    touch = f"import pathlib; pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    child = f"import time\nfor _ in range(900): {touch}"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}])"
    program = f"import subprocess, sys, time; {start}; time.sleep(60)"
    part = Part(name="long", half=1, limit_s=2, command=python(program))
    assert run(part, environment_of_parts(), tmp_path)["outcome"] == "not over in 2 s"
    alive.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not alive.exists()


def test_a_line_that_a_limit_cut_off_is_no_row(tmp_path: Path) -> None:
    part = Part(
        name="cut", half=1, limit_s=60, command=python("print('{\"a\": 1}'); print('{\"b\": ', end='')")
    )
    assert run(part, environment_of_parts(), tmp_path)["rows"] == [{"a": 1}]


def test_a_call_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LEAST_S", 1)
    part = Part(name="long", half=2, limit_s=600, command=python("import time; time.sleep(60)"))
    outcomes = [run(part, {}, tmp_path, left_s=left_s)["outcome"] for left_s in (2.5, 0.5)]
    assert outcomes == ["not over in 2 s", "no time left"]


def test_what_needs_a_gpu_says_so(tmp_path: Path) -> None:
    part = Part(name="gpu", half=2, limit_s=1, command=python("raise SystemExit(1)"), needs_gpu=True)
    assert run(part, environment_of_parts(), tmp_path)["outcome"] == "needs a GPU"
