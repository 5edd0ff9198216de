"""`init_context`: build a model that no rank could hold; and where its values will come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from zerotrain.contract.config import EngineConfig, load
from zerotrain.runtime.construct.log import ConstructionLog, NoValues, TensorRef
from zerotrain.runtime.construct.recorder import HostTensors, Recorder
from zerotrain.runtime.zero.names import all_modules, holder_of, joined


class Origin(Protocol):
    """Where the values of one tensor come from. Local: no collective."""

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill 1-D `target` with elements `[start, start + target.numel())` of the flattened tensor."""


class Replayed:
    """Values that a construction log gives."""

    def __init__(self, log: ConstructionLog, ref: TensorRef) -> None:
        self._log = log
        self._ref = ref

    def read(self, start: int, target: torch.Tensor) -> None:
        values = self._log.materialise(self._ref).reshape(-1)
        target.copy_(values[start : start + target.numel()])


_logs: WeakKeyDictionary[nn.Module, ConstructionLog] = WeakKeyDictionary()
_registered: WeakKeyDictionary[nn.Module, dict[str, TensorRef]] = WeakKeyDictionary()
"""Tensors as constructors registered them; `model.to(dtype)` afterwards makes others that no log knows."""

_bound: WeakKeyDictionary[nn.Module, Mapping[str, Origin]] = WeakKeyDictionary()


@contextlib.contextmanager
def init_context(
    config: EngineConfig | Mapping[str, Any] | Path | str | None = None,
    *,
    seed: int | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Within the context, constructors make tensors on the meta device: a model of any size takes no memory.

    `initialize` then gives every rank its own part of the values, parameter by parameter, by running again
    what the constructors did (`reset_parameters`, `_init_weights`, plain `torch.nn.init` calls, rotary
    tables): the host never holds more than the rank's share and one unit. Each random operation has a seed
    of its own, derived from `seed` and its number. So the values are the same for every number of ranks,
    every stage and every device, but are other random numbers than a plain construction draws. Code inside
    the context may read values (`.item()`, `.tolist()`); they are computed on the spot.

    Args:
        config: the configuration of `initialize`, checked before minutes of building; may be None.
        seed: of the random values; `torch.initial_seed()` of rank 0 unless given.
        enabled: False builds plainly, for scripts with a switch.

    Raises ConfigError when `config` cannot be read. Build the model the same way on every rank.
    """
    if config is not None and not isinstance(config, EngineConfig):
        load(config)
    if not enabled:
        yield
        return
    log = ConstructionLog(torch.initial_seed() if seed is None else seed)

    def remember(module: nn.Module, name: str, value: object) -> None:
        _logs[module] = log
        if isinstance(value, torch.Tensor):
            _registered.setdefault(module, {})[name] = TensorRef.of(value)

    hooks = (
        module_hooks.register_module_parameter_registration_hook(remember),
        module_hooks.register_module_buffer_registration_hook(remember),
        module_hooks.register_module_module_registration_hook(remember),
    )
    try:
        with HostTensors(log), Recorder(log):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def bind(model: nn.Module, origins: Mapping[str, Origin]) -> None:
    """From now on these parameters and buffers (names as in `model`) take their values from `origins`."""
    _bound[model] = {**_bound.get(model, {}), **origins}


def logs_of(model: nn.Module) -> list[ConstructionLog]:
    """The constructions that the model's modules come from; usually one or none."""
    return list(
        {id(log): log for module in model.modules() if (log := _logs.get(module)) is not None}.values()
    )


def replayed_origin(
    model: nn.Module, name: str, tensor: torch.Tensor, logs: Sequence[ConstructionLog]
) -> Replayed | None:
    """How a deferred parameter or buffer of the model gets its values; None when none of `logs` knows it.

    Raises NoValues when its construction never gave it any.
    """
    registered = _registered.get(holder_of(model, name), {}).get(name.rpartition(".")[2])
    candidates = [TensorRef.of(tensor)]
    if registered is not None and registered.size == tuple(tensor.shape):
        candidates.append(registered)
    for ref in candidates:
        for log in logs:
            if log.knows(ref):
                if not log.has_values(ref):
                    raise NoValues(name)
                return Replayed(log, ref)
    return None


def forget(model: nn.Module) -> None:
    """Drop what is known about the model's construction and files, once the values are on their way."""
    for module in model.modules():
        for memory in (_logs, _registered, _bound):
            memory.pop(module, None)


def bound_origins(model: nn.Module) -> dict[str, Origin]:
    """What was bound to the model or a module of it, by name in `model`."""
    found: dict[str, Origin] = {}
    for prefix, module in all_modules(model):
        for name, origin in _bound.get(module, {}).items():
            found[joined(prefix, name)] = origin
    return found
