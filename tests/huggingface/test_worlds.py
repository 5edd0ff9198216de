"""Installed libraries have the symbols of the table; a rank in a world of its own ends before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hf_scripts import ScriptFailed, run_script

pytestmark = pytest.mark.ranks

IMPORTS_ALL = """
import importlib
from zerotrain.compat.libraries.table import SURFACES
for surface in SURFACES:
    importlib.import_module(surface.module)
"""
ACCELERATE = """
import os
del os.environ["LOCAL_RANK"]
from accelerate import PartialState
PartialState()
"""
LIGHTNING = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
lightning.Trainer(accelerator="cpu", devices=1, logger=False, max_steps=1).fit(BoringModel())
"""


def script(folder: Path, text: str) -> Path:
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def test_installed_versions_have_every_symbol(tmp_path: Path) -> None:
    run_script(script(tmp_path, IMPORTS_ALL), tmp_path, ranks=1)


@pytest.mark.parametrize(("library", "text"), [("Accelerate", ACCELERATE), ("Lightning", LIGHTNING)])
def test_a_world_of_ones_own_is_refused(tmp_path: Path, library: str, text: str) -> None:
    with pytest.raises(ScriptFailed, match=f"{library} sees 1 rank, but 2 were started"):
        run_script(script(tmp_path, text), tmp_path)
