"""Import hook that gives the modules of `zerotrain.runtime.deepspeed` under DeepSpeed's names.

A module is the same object under both names, so that what a library sets in one is seen in the other.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

NAME = "deepspeed"
HOME = "zerotrain.runtime"
"""Package whose `deepspeed` is given."""


class DeepSpeedFinder:
    """Finder of DeepSpeed's modules and of the metadata that libraries ask for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module; None for other names.

        That of `deepspeed` itself loads nothing. Raises ModuleNotFoundError, with the reason, for a module of
        DeepSpeed's that is not here.
        """
        if fullname == NAME:
            return _spec(fullname, is_package=True)
        if not fullname.startswith(f"{NAME}."):
            return None
        try:
            found = importlib.util.find_spec(f"{HOME}.{fullname}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(str(error), name=fullname) from None
        if found is None:
            return None
        return _spec(fullname, is_package=found.submodule_search_locations is not None)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Return the metadata of `deepspeed` to a caller that asks for it or for all packages."""
        if context.name is not None and context.name.lower() != NAME:
            return []
        # Imported late: this module loads e-mail's parser, which the start of a process need not wait for.
        from zerotrain.compat.distribution import DeepSpeedDistribution

        return [DeepSpeedDistribution()]


class _AliasLoader:
    """Loader that imports the real module and gives that."""

    def __init__(self) -> None:
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{HOME}.{spec.name}")
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced; its code ran before."""
        module.__spec__ = self._own_spec


def _spec(name: str, *, is_package: bool) -> ModuleSpec:
    return ModuleSpec(name, _AliasLoader(), origin=f"{HOME}.{name}", is_package=is_package)  # type: ignore[arg-type]
