"""`import deepspeed` gives the engine's module after one line, also below it, with honest metadata."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

PREFIX = "import zerotrain.compat; zerotrain.compat.deepspeed()\n"


def ran(code: str, folder: Path, *, prefix: str = PREFIX) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    (folder / "script.py").write_text(prefix + code)
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "import deepspeed, zerotrain.runtime.deepspeed as ours; assert deepspeed is ours\n"
        "from deepspeed.ops.adam import FusedAdam; assert FusedAdam is ours.ops.adam.FusedAdam\n"
        "import deepspeed.runtime.zero.partition_parameters as p\n"
        "assert p is ours.runtime.zero.partition_parameters\n"
        "assert deepspeed.__spec__.name == 'zerotrain.runtime.deepspeed'",
        "import sys, importlib.util; assert importlib.util.find_spec('deepspeed').origin == "
        "'zerotrain.runtime.deepspeed'; assert 'torch' not in sys.modules",
        "import importlib.metadata as m, deepspeed; assert m.version('deepspeed') == deepspeed.__version__\n"
        "assert m.metadata('DeepSpeed')['Summary'].startswith('Not DeepSpeed: zerotrain')\n"
        "assert 'docs/deepspeed.md' in m.metadata('deepspeed')['Project-URL']\n"
        "assert m.packages_distributions()['deepspeed'] == ['deepspeed']\n"
        "assert not m.files('deepspeed') and m.version('pytest')",
        "zerotrain.compat.deepspeed()",
    ],
)
def test_names_and_metadata(code: str, tmp_path: Path) -> None:
    result = ran(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_name_that_is_absent_says_why(tmp_path: Path) -> None:
    result = ran(
        "try:\n    import deepspeed.pipe\nexcept ModuleNotFoundError as e:\n    print(e.name, e)\n", tmp_path
    )
    assert result.stdout.startswith("deepspeed.pipe deepspeed.pipe is not here: pipeline parallelism")


def test_nothing_is_found_without_the_line(tmp_path: Path) -> None:
    result = ran("import deepspeed", tmp_path, prefix="")
    assert "No module named 'deepspeed'" in result.stderr
