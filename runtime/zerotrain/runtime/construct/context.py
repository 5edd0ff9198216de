"""`init_context`, which builds a model that no rank could hold, and the record of where its values come
from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from zerotrain.contract.config import EngineConfig, load
from zerotrain.runtime.construct.expressions import Result
from zerotrain.runtime.construct.log import ConstructionLog, NoValues, TensorRef
from zerotrain.runtime.construct.recorder import HostTensors, Recorder
from zerotrain.runtime.zero.names import all_modules, holder_of, joined


class Origin(Protocol):
    """Source of the values of one tensor. Local: no collective."""

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill 1-D `target` with elements `[start, start + target.numel())` of the flattened tensor."""


class Replayed(Result):
    """Values that are replayed from a construction log."""

    def __init__(self, log: ConstructionLog, ref: TensorRef) -> None:
        super().__init__(ref.size, ref.dtype)
        self.log = log
        self._ref = ref

    @property
    def num_operations(self) -> int:
        """Number of operations that the values depend on."""
        return self.log.num_operations(self._ref)

    def _compute(self) -> torch.Tensor:
        return self.log.materialise(self._ref)


_logs: WeakKeyDictionary[nn.Module, ConstructionLog] = WeakKeyDictionary()
_registered: WeakKeyDictionary[nn.Module, dict[str, TensorRef]] = WeakKeyDictionary()
"""Tensors as constructors registered them. `model.to(dtype)` later makes other tensors that no log knows."""

_places: dict[int, tuple[ReferenceType[nn.Module], str]] = {}
"""Modules and names of the parameters that constructors registered, by the parameters' ids, as `origin_of`
found them last: a script may ask for each parameter by itself."""

_bound: WeakKeyDictionary[nn.Module, Mapping[str, Origin]] = WeakKeyDictionary()

_is_recording: ContextVar[bool] = ContextVar("is_recording", default=False)


@contextlib.contextmanager
def init_context(
    config: EngineConfig | Mapping[str, Any] | Path | str | None = None,
    *,
    seed: int | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Build models without memory: in this context constructors make tensors on the meta device.

    `initialize` then gives every rank its own part of the values, parameter by parameter, by running again
    what the constructors did (`reset_parameters`, `_init_weights`, plain `torch.nn.init` calls, rotary
    tables). The host never holds more than the rank's share and one unit. Each random operation has a seed of
    its own, derived from `seed` and its number. So the values are the same for every number of ranks, every
    stage and every device, but are other random numbers than a plain construction draws. Code inside the
    context may read values (`.item()`, `.tolist()`); they are computed immediately.

    Args:
        config: the configuration of `initialize`, checked before minutes of building; may be None.
        seed: seed of the random values; `torch.initial_seed()` of rank 0 unless given.
        enabled: False builds the model normally, for scripts with a switch.

    Raises ConfigError if `config` cannot be read. Build the model the same way on every rank.
    """
    if config is not None and not isinstance(config, EngineConfig):
        load(config)
    if not enabled:
        yield
        return
    with recording(ConstructionLog(torch.initial_seed() if seed is None else seed)):
        yield


@contextlib.contextmanager
def recording(log: ConstructionLog) -> Iterator[None]:
    """Record constructors in a log; their tensors are on the meta device."""

    def remember(module: nn.Module, name: str, value: object) -> None:
        _logs[module] = log
        if isinstance(value, torch.Tensor):
            _registered.setdefault(module, {})[name] = TensorRef.of(value)

    hooks = (
        module_hooks.register_module_parameter_registration_hook(remember),
        module_hooks.register_module_buffer_registration_hook(remember),
        module_hooks.register_module_module_registration_hook(remember),
    )
    token = _is_recording.set(True)
    try:
        with HostTensors(log), Recorder(log):
            yield
    finally:
        _is_recording.reset(token)
        for hook in hooks:
            hook.remove()


def is_recording() -> bool:
    """Return whether constructors are recorded now."""
    return _is_recording.get()


def bind(model: nn.Module, origins: Mapping[str, Origin]) -> None:
    """Make these parameters and buffers (names as in `model`) take their values from `origins`."""
    _bound[model] = {**_bound.get(model, {}), **origins}


def logs_of(model: nn.Module) -> list[ConstructionLog]:
    """Return the construction logs of the model's modules; usually one or none."""
    return list(
        {id(log): log for module in model.modules() if (log := _logs.get(module)) is not None}.values()
    )


def replayed_origin(
    model: nn.Module, name: str, tensor: torch.Tensor, logs: Sequence[ConstructionLog]
) -> Replayed | None:
    """Return the origin of a deferred parameter or buffer of the model; None if none of `logs` knows it.

    Raises NoValues if its construction never gave it values.
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


def origin_of(parameter: nn.Parameter) -> Replayed | None:
    """Return the origin of a deferred parameter before anybody has named its model; None if no context made
    it or its construction never gave it values."""
    place = _places.get(id(parameter))
    if place is None or not _is_at(parameter, *place):
        _places.clear()
        for module, names in _registered.items():
            _places.update(
                (id(module._parameters.get(name)), (ReferenceType(module), name)) for name in names
            )
        place = _places.get(id(parameter))
    holder = place[0]() if place else None
    if place is None or holder is None:
        return None
    with contextlib.suppress(NoValues):
        return replayed_origin(holder, place[1], parameter, [_logs[holder]])
    return None


def _is_at(parameter: nn.Parameter, module: ReferenceType[nn.Module], name: str) -> bool:
    holder = module()
    return holder is not None and holder._parameters.get(name) is parameter


def forget(model: nn.Module) -> None:
    """Drop the records of the model's construction and files, once they are not needed any more."""
    for module in model.modules():
        for memory in (_logs, _registered, _bound):
            memory.pop(module, None)
    _places.clear()


def bound_origins(model: nn.Module) -> dict[str, Origin]:
    """Return the origins that were bound to the model or a module of it, by name in `model`."""
    found: dict[str, Origin] = {}
    for prefix, module in all_modules(model):
        for name, origin in _bound.get(module, {}).items():
            found[joined(prefix, name)] = origin
    return found
