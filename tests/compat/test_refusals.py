"""The alias is refused, with the way out, where it would hide a real DeepSpeed or comes too late."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

CALL = "import zerotrain.compat\nzerotrain.compat.deepspeed(replace=False)\nimport deepspeed"


def ran(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, *options, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )


def installed(folder: Path) -> None:
    """Put a package deepspeed beside the script."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = 'theirs'")


def test_an_installed_deepspeed_is_not_hidden(tmp_path: Path) -> None:
    installed(tmp_path)
    done = ran(tmp_path, CALL)
    assert f"CompatError: DeepSpeed is installed here ({tmp_path}/deepspeed/__init__.py)" in done.stderr
    assert "pip uninstall deepspeed" in done.stderr
    assert "zerotrain.compat.deepspeed(replace=True)" in done.stderr


def test_only_metadata_count_as_installed_too(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed-0.19.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.2\n")
    assert "DeepSpeed is installed here (version 0.19.2)" in ran(tmp_path, CALL).stderr


def test_a_folder_of_configurations_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    done = ran(tmp_path, f"{CALL}.utils\nprint(deepspeed.__name__)")
    assert done.stdout == "zerotrain.runtime.deepspeed\n", done.stderr


def test_it_is_replaced_on_request(tmp_path: Path) -> None:
    installed(tmp_path)
    shown = "import importlib.metadata, deepspeed\nprint(importlib.metadata.version('deepspeed'))"
    assert "+zerotrain" in ran(tmp_path, CALL.replace("False", "True") + "\n" + shown).stdout
    assert "+zerotrain" in ran(tmp_path, shown, "-m", "zerotrain.compat", "--replace-deepspeed").stdout
    done = ran(tmp_path, shown, "-m", "zerotrain.compat")
    assert done.returncode == 64
    assert done.stderr.startswith("zerotrain.compat: DeepSpeed is installed here")


@pytest.mark.parametrize(
    "name", ["deepspeed", "transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric"]
)
def test_after_the_import_of_a_library_that_looked_it_is_too_late(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").touch()
    for replace in ("False", "True"):
        done = ran(tmp_path, f"import {name}\n{CALL.replace('False', replace)}")
        assert f"CompatError: {name} was imported before" in done.stderr
        assert "`zerotrain launch`" in done.stderr


def test_a_second_call_after_such_an_import_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").touch()
    done = ran(
        tmp_path, f"import zerotrain.compat\nzerotrain.compat.deepspeed()\nimport transformers\n{CALL}"
    )
    assert done.returncode == 0, done.stderr
