"""`generate` of Hugging Face models where ranks hold parts of the weights.

A forward pass at stage 3 needs all ranks, so a rank whose sequences have ended must go on until those of all
ranks have. transformers does that under `synced_gpus=True`, and sets it by itself for the kinds of sharding
that it recognises. Here an engine gives its model that default: an attribute of the modules that have such a
`generate`, until `close`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from zerotrain.runtime.zero.sharded_model import ShardedModel

ARGUMENT = "synced_gpus"

ADVICE = f"where ranks generate different numbers of tokens, pass {ARGUMENT}=True to generate()"


class SyncedGeneration:
    """Default of `synced_gpus` for the model of one engine."""

    def __init__(self, core: ShardedModel) -> None:
        """Attach the default; do nothing where a forward pass does not need the other ranks."""
        self._core = core
        self._modules: list[nn.Module] = []
        if core.options.placement.params_sharded and core.comm.world_size > 1:
            places: dict[type, int | None] = {}
            for module in core.model.modules():
                kind = type(module)
                if kind not in places:
                    places[kind] = _place_of_argument(kind)
                if (place := places[kind]) is not None and "generate" not in vars(module):
                    self._attach(module, place)

    def detach(self) -> None:
        """Restore the modules."""
        for module in self._modules:
            vars(module).pop("generate", None)
        self._modules.clear()

    def _attach(self, module: nn.Module, place: int) -> None:
        generate: Callable[..., Any] = getattr(module, "generate")  # noqa: B009  # for mypy a submodule

        @wraps(generate)
        def in_step(*args: Any, **kwargs: Any) -> Any:
            by_position = len(args) > place
            asked = args[place] if by_position else kwargs.get(ARGUMENT)
            if asked is None:
                if by_position:
                    args = (*args[:place], self._takes_all_ranks(), *args[place + 1 :])
                else:
                    kwargs[ARGUMENT] = self._takes_all_ranks()
            elif not asked and self._takes_all_ranks():
                self._core.comm.advise(ADVICE)
            return generate(*args, **kwargs)

        vars(module)["generate"] = in_step
        self._modules.append(module)

    def _takes_all_ranks(self) -> bool:
        """Return whether a forward pass needs all ranks: not within `full_parameters`, where one rank may
        generate alone."""
        core = self._core
        return any(unit.placement.params_sharded and not core.holds[unit] for unit in core.units)


def _place_of_argument(kind: type) -> int | None:
    """Return the position of `synced_gpus` in `generate` of a module's class, without self; None if it has
    none."""
    generate = getattr(kind, "generate", None)
    if not callable(generate):
        return None
    try:
        names = list(inspect.signature(generate).parameters)
    except (TypeError, ValueError):  # not a Python function
        return None
    return names.index(ARGUMENT) - 1 if ARGUMENT in names else None
