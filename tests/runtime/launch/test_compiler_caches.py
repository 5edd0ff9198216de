"""Caches of compilers lie where a worker can write: in its home folder, or else in its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launcher import spec_for
from zerotrain.runtime.launch.process import rank_environment

pytestmark = pytest.mark.unit

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def caches(folder: Path, **environ: str) -> dict[str, str]:
    spec = spec_for(folder, ranks=1)
    found = rank_environment(spec, 0, environ, socket_path=Path("socket"), stacks_path=Path("stacks"))
    return {name: found[name] for name in NAMES if name in found}


def test_a_home_that_can_be_written_keeps_them(tmp_path: Path) -> None:
    assert caches(tmp_path, HOME=str(tmp_path)) == {}


@pytest.mark.parametrize("home", [{}, {"HOME": "/nowhere"}])
def test_else_they_are_in_the_worker_s_folder(home: dict[str, str], tmp_path: Path) -> None:
    folder = spec_for(tmp_path, ranks=1).run_dir / "compiled"
    assert caches(tmp_path, **home) == {NAMES[0]: str(folder), NAMES[1]: str(folder / "triton")}


def test_the_worker_s_own_folders_stay(tmp_path: Path) -> None:
    own = dict.fromkeys(NAMES, "/fast")
    assert caches(tmp_path, HOME="/nowhere", **own) == own
