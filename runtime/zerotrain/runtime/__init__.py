"""The ZeRO engine. `import zerotrain.runtime as zt` is the whole public surface.

Names load on first use (PEP 562), so that the torch-free parts (`zerotrain.runtime.launch`, the channel) can
be imported from this package without paying for, or having, torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerotrain.runtime.engine import Engine, initialize
    from zerotrain.runtime.step import StepResult
    from zerotrain.runtime.zero.access import full_parameters
    from zerotrain.runtime.zero.placeholder import ParameterSharded

_HOME = {
    "Engine": "zerotrain.runtime.engine",
    "ParameterSharded": "zerotrain.runtime.zero.placeholder",
    "StepResult": "zerotrain.runtime.step",
    "full_parameters": "zerotrain.runtime.zero.access",
    "initialize": "zerotrain.runtime.engine",
}

__all__ = ["Engine", "ParameterSharded", "StepResult", "full_parameters", "initialize"]


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
