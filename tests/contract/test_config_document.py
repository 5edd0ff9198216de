"""`docs/configuration.md` and `docs/postponed.md` are what the table of keys generates."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.contract.config import postponed
from zerotrain.contract.config.document import document
from zerotrain.contract.config.table import KEYS

pytestmark = pytest.mark.ranks


DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "configuration.md"


def test_the_file_is_up_to_date() -> None:
    command = "python -m zerotrain.contract.config.document > docs/configuration.md"
    assert FILE.read_text(encoding="utf-8") == document(), f"regenerate it: {command}"


def test_the_table_of_what_is_left_out_is_up_to_date() -> None:
    command = "python -m zerotrain.contract.config.postponed > docs/postponed.md"
    written = (DOCS / "postponed.md").read_text(encoding="utf-8")
    assert written == postponed.document(), f"regenerate it: {command}"


@pytest.mark.parametrize(("module", "text"), [("document", document), ("postponed", postponed.document)])
def test_the_commands_print_them(module: str, text: Callable[[], str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"zerotrain.contract.config.{module}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == text()


def test_every_key_has_its_row() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)`", document(), flags=re.MULTILINE)
    assert rows == [key.path for key in KEYS]
    assert all(line.count(" | ") == 4 for line in document().splitlines() if line.startswith("| `"))
