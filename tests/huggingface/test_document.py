"""The script and the commands of docs/huggingface.md train, stop and go on as the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "huggingface.md"


def block(language: str) -> str:
    """Return the first block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python"))
    (tmp_path / "ds.json").write_text(block("json"))
    commands = re.findall(r"^zerotrain launch(?:.*\\\n)*.*$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(commands) == 2
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command, last in zip(commands, (20, 40), strict=True):
        words = [word for word in shlex.split(command) if word.strip()]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert (tmp_path / f"out/checkpoint-{last}/trainer_state.json").exists()
    assert (tmp_path / "out/model.safetensors").exists()
