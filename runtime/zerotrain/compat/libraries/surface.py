"""One symbol of another library that zerotrain relies on or mends, and the error for one that is gone."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

DOCUMENT = "docs/huggingface.md"

MENDS = "zerotrain.compat.libraries.mends"

TESTED = {
    "accelerate": "1.15",
    "transformers": "5.24",
    "trl": "1.16",
    "peft": "0.21",
    "lightning": "2.6",
    "pytorch-lightning": "2.6",
}
"""Versions of each library with which its rows were tested: from, and up to which."""


class MissingSurface(ImportError):
    """A library in a version that lacks a symbol on which zerotrain relies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """A symbol, with the reason why it is needed."""

    module: str
    """Module that defines the symbol, for example `accelerate.state`."""

    symbol: str
    """Dotted name within the module."""

    why: str
    """Effect of leaving the row out."""

    mend: str | None = None
    """Function below `mends` that changes the module, as `module.function`; None = the symbol is only relied
    on."""

    distribution: str | None = None
    """Name under which the library is installed; None = that of its first module."""

    @property
    def library(self) -> str:
        """Name of the installed distribution."""
        return self.distribution or self.module.partition(".")[0]

    def apply(self, module: ModuleType) -> None:
        """Check that the symbol exists, and mend it. Raises MissingSurface."""
        found: Any = module
        for part in self.symbol.split("."):
            found = getattr(found, part, None)
            if found is None:
                raise MissingSurface(self._gone(), name=self.module)
        if self.mend is not None:
            home, _, name = self.mend.rpartition(".")
            getattr(importlib.import_module(f"{MENDS}.{home}"), name)(module)

    def _gone(self) -> str:
        return (
            f"{self.library} {installed(self.library)} has no {self.module}.{self.symbol}, which zerotrain "
            f"needs: {self.why}. It was tested with {self.library} {TESTED[self.library]}: install one of "
            f"these versions, or a newer zerotrain. See {DOCUMENT}"
        )


def installed(library: str) -> str:
    """Return the installed version of a library, or "unknown"."""
    # Imported late: it loads e-mail's parser, for which the start of a process need not wait.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
