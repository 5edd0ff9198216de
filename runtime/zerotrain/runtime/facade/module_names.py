"""The engine's interface as the module that DeepSpeed's engine is: its model's parts, under the model's own
names.

The engine is not an `nn.Module` itself (docs/adr/0055): the other operations of a module (`to`, `half`,
hooks, new children) would bypass the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from zerotrain.runtime.zero import names as plain

Part = TypeVar("Part")


class ModuleNames:
    """Read access to the model, as nn.Module offers it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the model's parameters; sharded ones cannot be read outside of `full_parameters`."""
        return self._module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters with the names that they have in the plain model."""
        named = plain.named_parameters(self._module, remove_duplicate=remove_duplicate)
        return _below(prefix, named, recurse=recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Return the model's buffers."""
        return self._module.buffers(recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers with the names that they have in the plain model."""
        named = plain.named_buffers(self._module, remove_duplicate=remove_duplicate)
        return _below(prefix, named, recurse=recurse)

    def modules(self) -> Iterator[nn.Module]:
        """Return the model and all modules in it."""
        return self._module.modules()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules, without those of `memo`, with the names that they have in the plain model; a
        wrapper of torch's takes the place of the module that it wraps."""
        walked = plain.walk(self._module, remove_duplicate=remove_duplicate)
        named = ((name, layers[0]) for name, layers in walked if not memo or layers[0] not in memo)
        return _below(prefix, named)

    def children(self) -> Iterator[nn.Module]:
        """Return the model alone, as in DeepSpeed's engine."""
        return iter([self._module])

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the model under the name `module`."""
        return iter([("module", self._module)])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict, with the plain model's names; `module_state_dict` returns whole
        values at every stage."""
        state: dict[str, Any] = self._module.state_dict(*args, **kwargs)
        names = {name: plain.plain_key(self._module, name) for name in state}
        if all(name == other for name, other in names.items()):
            return state
        return {names[name]: value for name, value in state.items()}


def _below(
    prefix: str, named: Iterable[tuple[str, Part]], *, recurse: bool = True
) -> Iterator[tuple[str, Part]]:
    """Yield the names below a prefix; without `recurse` only those of the model itself."""
    for name, part in named:
        if recurse or "." not in name:
            yield plain.joined(prefix, name) if name else prefix, part
