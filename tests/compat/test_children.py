"""Processes that a script starts have the alias, too: workers of a DataLoader of every kind, and others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.compat.processes import STARTUP

pytestmark = pytest.mark.ranks

LOADER = """
import sys
import deepspeed
from torch.utils.data import DataLoader, Dataset

class Names(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        import deepspeed.utils, importlib.metadata
        return f"{deepspeed.utils.__name__} {importlib.metadata.version('deepspeed')}"

if __name__ == "__main__":
    loader = DataLoader(Names(), num_workers=1, batch_size=None, multiprocessing_context=sys.argv[1])
    print(list(loader))
"""

CHILD = "import importlib.util, sys; found = importlib.util.find_spec('deepspeed'); print("


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(LOADER)
    output = run(sys.executable, "-m", "zerotrain.compat", "script.py", kind, cwd=tmp_path)
    assert output.count("zerotrain.runtime.deepspeed.utils 0.") == 2


def below(tmp_path: Path, code: str, **variables: str) -> str:
    """Return the output of a process that a script with the alias starts."""
    script = (
        "import subprocess, sys, zerotrain.compat\nzerotrain.compat.deepspeed()\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    return run(sys.executable, "-c", script, code, cwd=tmp_path, **variables)


def test_a_subprocess_and_its_own(tmp_path: Path) -> None:
    assert below(tmp_path, f"{CHILD}found.origin)") == "zerotrain.runtime.deepspeed\n"
    again = f"import subprocess, sys; subprocess.run([sys.executable, '-c', \"{CHILD}found.origin)\"])"
    assert below(tmp_path, again) == "zerotrain.runtime.deepspeed\n"


def test_the_start_of_a_child_loads_no_torch(tmp_path: Path) -> None:
    loaded = "[name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'email')]"
    assert below(tmp_path, f"{CHILD}{loaded})") == "[]\n"


def test_an_existing_sitecustomize_runs_and_is_the_one_that_is_seen(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('theirs', flush=True); mark = 7")
    code = f"{CHILD}found.origin, __import__('sitecustomize').mark, {STARTUP!r} in sys.path)"
    output = below(tmp_path, code, PYTHONPATH=str(tmp_path / "site"))
    assert output == "theirs\ntheirs\nzerotrain.runtime.deepspeed 7 False\n"


def test_other_entries_of_pythonpath_stay(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "beside.py").write_text("value = 3")
    output = below(tmp_path, f"{CHILD}__import__('beside').value)", PYTHONPATH=str(tmp_path / "modules"))
    assert output == "3\n"


def test_an_interpreter_without_zerotrain_starts_as_usual(tmp_path: Path) -> None:
    bare = sys._base_executable  # type: ignore[attr-defined]
    if bare == sys.executable:
        pytest.skip("this is no virtual environment, so there is no interpreter without zerotrain")
    assert run(bare, "-c", f"{CHILD}found)", cwd=tmp_path, PYTHONPATH=STARTUP) == "None\n"


def test_a_process_outside_the_tree_has_no_alias(tmp_path: Path) -> None:
    assert below(tmp_path, f"{CHILD}found is None)", PYTHONPATH="") == "False\n"
    assert run(sys.executable, "-c", f"{CHILD}found)", cwd=tmp_path) == "None\n"
