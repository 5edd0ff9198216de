"""Hooks for a state dict that the user loads into the model or a part of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from zerotrain.runtime.zero.sharded_model import ShardedModel


class WaitForUpdates:
    """Hook before `load_state_dict` writes into a module: it waits for pending updates, which would overwrite
    the loaded values. Does nothing in a copy of the module."""

    __slots__ = ("_core",)

    def __init__(self, core: ShardedModel | None) -> None:
        self._core = None if core is None else weakref.ref(core)

    def __call__(self, *_arguments: object) -> None:
        core = None if self._core is None else self._core()
        if core is not None and not core.is_closed:
            core.updates.settle_all()

    def __reduce__(self) -> Any:
        return type(self), (None,)


def wait_before_loading(core: ShardedModel) -> list[RemovableHandle]:
    """Hook every module; calls of modules do not trigger the hook. `writes.py` finds what was loaded."""
    hook = WaitForUpdates(core)
    return [
        module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        for module in core.model.modules()
    ]
