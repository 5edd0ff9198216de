"""The table of other libraries' symbols: rows apply after an import; a missing one is explained."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from zerotrain.compat.libraries.imports import AfterImport, rows_by_module
from zerotrain.compat.libraries.surface import MENDS, TESTED, MissingSurface, Surface
from zerotrain.compat.libraries.table import SURFACES

pytestmark = pytest.mark.unit

NAME = "a_library_of_others"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("class Thing:\n    def act(self):\n        return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TESTED, NAME, "1 to 3")
    yield NAME
    sys.modules.pop(NAME, None)


def row(symbol: str, mend: str | None = None) -> Surface:
    return Surface(module=NAME, symbol=symbol, why="a reason", mend=mend)


@pytest.fixture
def mends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Provide a module of mends whose function records what it was given."""
    applied: list[str] = []
    module = ModuleType(f"{MENDS}.a_library")
    module.note = lambda given: applied.append(given.__name__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return applied


def import_with(surfaces: list[Surface]) -> ModuleType:
    finder = AfterImport(rows_by_module(surfaces))
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(NAME)
    finally:
        sys.meta_path.remove(finder)


def test_a_row_is_applied_once_its_module_has_run(library: str, mends: list[str]) -> None:
    module = import_with([row("Thing.act", "a_library.note"), row("Thing")])
    assert mends == [library]
    assert module.Thing().act() == 1
    assert "return 1" in inspect.getsource(module.Thing), "the module lost its own loader"


def test_a_missing_symbol_is_named_with_the_way_out(library: str, mends: list[str]) -> None:
    with pytest.raises(MissingSurface) as caught:
        import_with([row("Thing.gone", "a_library.note")])
    text = str(caught.value)
    assert not mends
    for part in (
        f"{library} unknown has no {library}.Thing.gone",
        "a reason",
        "1 to 3",
        "docs/huggingface.md",
    ):
        assert part in text


def test_other_modules_are_left_to_the_other_finders(library: str) -> None:
    assert AfterImport(rows_by_module([row("Thing")])).find_spec("json") is None
    assert AfterImport(rows_by_module([row("Thing")])).find_spec(library) is not None


def test_every_row_has_a_reason_and_its_function_exists() -> None:
    for surface in SURFACES:
        assert surface.why
        assert TESTED[surface.library]
        if surface.mend is not None:
            file, _, function = surface.mend.rpartition(".")
            source = Path(sys.modules[Surface.__module__].__file__ or "").parent / "mends" / f"{file}.py"
            assert f"\ndef {function}(module: ModuleType) -> None:" in source.read_text(), surface.mend
