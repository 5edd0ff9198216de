"""The spill file's real bytes hold no weight, gradient or state; without encryption the search finds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks


REPOSITORY = Path(__file__).parents[3]
CASES = ("AEAD-master", "AEAD-remainder", "None-master", "None-remainder")


def test_known_patterns_are_only_in_a_plain_spill_file(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.spilling_engine", str(tmp_path), *CASES]
    run = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    reports = dict(zip(CASES, map(json.loads, run.stdout.splitlines()), strict=True))
    moments = {"first moment", "second moment"}
    assert set(reports["None-master"]["held"]) == {"master", *moments}
    assert set(reports["None-remainder"]["held"]) == {"remainder", *moments}
    for case in ("AEAD-master", "AEAD-remainder"):
        assert reports[case]["held"] == []
        assert reports[case]["compressible"] == 0
        assert reports[case]["bytes"] == reports[case.replace("AEAD", "None")]["bytes"] > 0
    assert reports["None-master"]["compressible"] > 10
    assert not list(tmp_path.iterdir())
