"""`python -m zerotrain.compat` runs a script or a module as `python` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

SCRIPT = """
import atexit, sys, beside
name = "kept"
atexit.register(lambda: print("exit", name))
print(__name__, __file__, sys.argv, sys.path[0], beside.value, __spec__ is None, sys.modules["__main__"].name)
"""


def python(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    (place / "script.py").write_text(SCRIPT)
    (place / "beside.py").write_text("value = 4")
    return tmp_path


def test_a_script_sees_the_same_as_below_python(folder: Path) -> None:
    plain = python(folder, "place/script.py", "--replace-deepspeed", "x")
    ours = python(folder, "-m", "zerotrain.compat", "place/script.py", "--replace-deepspeed", "x")
    assert plain.stdout.endswith("exit kept\n")
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, plain.returncode)
    assert not (folder / "place" / "__pycache__" / f"script.{sys.implementation.cache_tag}.pyc").exists()


def test_a_module_sees_the_same_as_below_python(folder: Path) -> None:
    (folder / "place" / "script.py").write_text(
        "import sys\nprint(__name__, __spec__.name, sys.argv[1:], sys.path[0])"
    )
    plain = python(folder, "-m", "place.script", "x")
    ours = python(folder, "-m", "zerotrain.compat", "-m", "place.script", "x")
    assert (ours.stdout, ours.returncode) == (plain.stdout, 0)


def test_the_local_rank_is_passed_on_request(folder: Path) -> None:
    (folder / "script.py").write_text("import sys; print(sys.argv[1:])")
    done = python(folder, "-m", "zerotrain.compat", "--pass-local-rank", "script.py", "x", LOCAL_RANK="3")
    assert done.stdout == "['x', '--local_rank=3']\n"


@pytest.mark.parametrize(("code", "status"), [("sys.exit(7)", 7), ("1 / 0", 1), ("sys.exit('no')", 1)])
def test_the_exit_code_is_the_scripts(folder: Path, code: str, status: int) -> None:
    (folder / "script.py").write_text(f"import sys\n{code}")
    assert python(folder, "-m", "zerotrain.compat", "script.py").returncode == status


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 64, "usage: python -m zerotrain.compat"),
        (("--ranks", "2", "place/script.py"), 64, "usage: python -m zerotrain.compat"),
        (("absent.py",), 69, "cannot read the script absent.py: No such file or directory"),
        (("place",), 69, "cannot read the script place: Is a directory"),
    ],
)
def test_what_cannot_be_run(folder: Path, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = python(folder, "-m", "zerotrain.compat", *arguments)
    assert done.returncode == status
    assert text in done.stderr


def test_a_library_that_sees_another_world_ends_the_rank_before_its_first_step(folder: Path) -> None:
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "__init__.py").touch()
    (folder / "accelerate" / "state.py").write_text(
        "class PartialState:\n    _shared_state = {'num_processes': 1}\n    def _prepare_backend(self): ..."
    )
    (folder / "script.py").write_text(
        "import accelerate.state, deepspeed, torch\n"
        "deepspeed.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 2})\nprint('trained')"
    )
    world = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = python(folder, "-m", "zerotrain.compat", "script.py", **world)
    assert done.returncode == 69
    assert "rank 1: Accelerate sees 1 rank, but 2 were started" in done.stderr
    assert done.stdout == ""
