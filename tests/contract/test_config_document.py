"""`docs/configuration.md` is what the table of keys generates."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from zerotrain.contract.config.document import document
from zerotrain.contract.config.table import KEYS

FILE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_file_is_up_to_date() -> None:
    command = "python -m zerotrain.contract.config.document > docs/configuration.md"
    assert FILE.read_text(encoding="utf-8") == document(), f"regenerate it: {command}"


def test_the_command_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zerotrain.contract.config.document"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == document()


def test_every_key_has_its_row() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)`", document(), flags=re.MULTILINE)
    assert rows == [key.path for key in KEYS]
    assert all(line.count(" | ") == 4 for line in document().splitlines() if line.startswith("| `"))
