"""Applies the rows of the table to each module right after it has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from zerotrain.compat.libraries.surface import Surface
from zerotrain.compat.libraries.table import SURFACES


def rows_by_module(surfaces: Sequence[Surface]) -> dict[str, list[Surface]]:
    """Return the rows of each module, in the order of the table."""
    found: dict[str, list[Surface]] = {}
    for surface in surfaces:
        found.setdefault(surface.module, []).append(surface)
    return found


class AfterImport(importlib.abc.MetaPathFinder):
    """Finder that lets the others find a module, and applies its rows once it has run."""

    def __init__(self, rows: Mapping[str, Sequence[Surface]]) -> None:
        self._rows = rows
        self._finding: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the other finders, with a loader that applies the rows afterwards; None for
        modules without rows."""
        if fullname not in self._rows or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Applying(spec.loader, self._rows[fullname])
        return spec


class _Applying(importlib.abc.Loader):
    """A module's own loader, then the rows."""

    def __init__(self, loader: importlib.abc.Loader, rows: Sequence[Surface]) -> None:
        self._loader, self._rows = loader, rows

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: `inspect` and `importlib.resources` ask it for sources.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for row in self._rows:
            row.apply(module)


def watch(surfaces: Sequence[Surface] = SURFACES) -> None:
    """Apply the rows of modules that are there already, and of others when they are imported."""
    if any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    rows = rows_by_module(surfaces)
    for name, found in rows.items():
        if name in sys.modules:
            for row in found:
                row.apply(sys.modules[name])
    sys.meta_path.insert(0, AfterImport(rows))
