"""Check, before anything is sharded, that units can be compiled on this machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerotrain.contract.config import ConfigError
from zerotrain.contract.config.schema import CompileConfig
from zerotrain.runtime.zero.names import is_compiled, walk

MAX_CAUSE_CHARS = 400
"""Length to which the text of a compiler's error is cut."""


def arguments(settings: CompileConfig) -> dict[str, Any]:
    """Return the arguments of torch.compile."""
    return {
        "backend": settings.backend,
        "mode": None if settings.mode == "default" else settings.mode,
        "options": dict(settings.options) if settings.options else None,
        "dynamic": settings.dynamic,
        "fullgraph": settings.fullgraph,
    }


def check_compilation(model: nn.Module, settings: CompileConfig, device: torch.device) -> None:
    """Compile and run a small function with the settings of the units; do nothing where `compile` is off.

    Raises ConfigError where torch.compile does not know the settings, where a program or a header that the
    backend needs is missing, and where the caller compiled a part of the model.
    """
    if not settings.enabled:
        return
    for name, layers in walk(model):
        if any(map(is_compiled, layers)):
            raise ConfigError(
                "compile.enabled",
                f"needs a model of which nothing is compiled; {name or 'the model'!r} is",
                True,
                "Remove the call of torch.compile or compile() before initialize, or set it to false.",
            )
    try:
        compiled = torch.compile(_small, **arguments(settings))
    except Exception as error:  # of several kinds
        value: Any
        if isinstance(error, torch._dynamo.exc.InvalidBackend):
            names = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
            field, value, way_out = "backend", settings.backend, f"Name one of {names}."
        else:
            field, value = "options", settings.options
            way_out = "Remove what the error names, or set compile.mode instead of options."
        raise ConfigError(
            f"compile.{field}", f"is refused by torch.compile ({_cause(error)})", value, way_out
        ) from error
    try:
        with torch.no_grad():  # one kernel, in place of one for backward besides
            compiled(torch.ones(64, device=device))
    except Exception as error:  # of a compiler, of several kinds
        raise ConfigError(
            "compile.backend",
            f"cannot compile on this machine ({_cause(error)}); {_needs(settings.backend, device)}",
            settings.backend,
            "Train in an image that has them, or set compile.enabled to false, or compile.backend to "
            '"aot_eager", which generates no code.',
        ) from error


def _small(values: torch.Tensor) -> torch.Tensor:
    return (values.sin() * values).sum()


def _needs(backend: str, device: torch.device) -> str:
    """Return what a backend needs beside torch."""
    if backend != "inductor":
        return "the backend names what it needs"
    if device.type == "cpu":
        return "inductor needs a C++ compiler (g++, or what CXX names) and Python's headers"
    return "inductor needs Triton, a C compiler (gcc or clang, or what CC names) and Python's headers"


def _cause(error: BaseException) -> str:
    """Return the first line of an error and, where a compiler wrote more, its line that says `error`."""
    error = getattr(error, "inner_exception", None) or error
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = next((line for line in rest if "error:" in line), None)
    text = f"{type(error).__name__}: {first}" if said is None else f"{type(error).__name__}: {first}: {said}"
    return text if len(text) <= MAX_CAUSE_CHARS else f"{text[:MAX_CAUSE_CHARS]}..."
