"""Choice of the linear layers of a model that compute in FP8, and what is said of the others."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from zerotrain.contract.config import ConfigError, EngineConfig
from zerotrain.contract.config.schema import Fp8Config
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.fp8.layers import Fp8Layers
from zerotrain.runtime.fp8.product import E4M3, SIZE_STEP, Scheme
from zerotrain.runtime.matmul_support import fp8_refusal
from zerotrain.runtime.notices import log_once
from zerotrain.runtime.zero.names import named_modules


def compute_in_fp8(model: nn.Module, config: EngineConfig, comm: Comm) -> Fp8Layers | None:
    """Make the model's linear layers compute as the `fp8` block says; None where it is off.

    Logs once which layers stay in bf16 for their sizes. Raises ConfigError where the device does not compute
    such products, and where no layer is left.
    """
    wanted = config.fp8
    if not wanted.enabled:
        return None
    if (reason := fp8_refusal(comm.device)) is not None:
        raise ConfigError("fp8.enabled", reason, True, "Set it to false, or train on GPUs that have FP8.")
    scheme = Scheme(by_row=wanted.recipe == "rowwise", weight_gradient=wanted.weight_gradient == "fp8")
    if (reason := product_refusal(scheme, comm.device)) is not None:
        raise ConfigError(
            "fp8.recipe", reason, wanted.recipe, "Take another recipe, or set fp8.enabled to false."
        )
    named = _candidates(model, wanted)
    chosen = {name: layer for name, layer in named.items() if _fits(layer)}
    if not chosen:
        raise ConfigError(
            "fp8.enabled",
            f"needs a torch.nn.Linear that fp8.exclude does not name and whose sizes {SIZE_STEP} divides; "
            f"the model has none ({len(named)} of other sizes)",
            True,
            "Set it to false, or change fp8.exclude.",
        )
    others = [name for name in named if name not in chosen]
    if others and comm.rank == 0:
        log_once(
            f"fp8: {len(others)} of {len(named)} linear layers stay in bf16, as {SIZE_STEP} does not divide "
            f"their sizes: {', '.join(others[:5])}{', ...' if others[5:] else ''}"
        )
    return Fp8Layers(list(chosen.values()), scheme, comm.device)


@torch.no_grad()
def product_refusal(scheme: Scheme, device: torch.device) -> str | None:
    """Return what is wrong with the scheme's products on the device, by trying small ones; None for nothing.

    Not every GPU that has FP8 has each kind: on some, torch's library refuses scales by rows.
    """
    ones = torch.ones(_TRIED, _TRIED, dtype=torch.bfloat16, device=device)
    try:
        for dtype, fast_sum in ((E4M3, True), (scheme.gradient_dtype, False)):
            operands = scheme.quantize(ones, dtype), scheme.quantize(ones, E4M3)
            found = scheme.product(*operands, fast_sum=fast_sum)
            if not found.eq(_TRIED).all():
                return f"computes wrong products on {device}: ones give {float(found[0, 0])}, not {_TRIED}"
    except (RuntimeError, ValueError) as error:  # of cuBLAS, or of torch's checks
        return f"is not possible on {device}, where torch {torch.__version__} says: {error}".split("\n")[0]
    return None


_TRIED = 64
"""Rows and columns of the products that are tried."""


def _candidates(model: nn.Module, wanted: Fp8Config) -> dict[str, nn.Linear]:
    """Return the linear layers that are not excluded, by name. Subclasses and layers whose forward somebody
    replaced compute something of their own."""
    return {
        name: module
        for name, module in named_modules(model)
        if type(module) is nn.Linear and "forward" not in vars(module) and not _is_named(name, wanted.exclude)
    }


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the name or its last parts: `head` is `head` and `model.head`."""
    return any(fnmatchcase(name, each) or fnmatchcase(name, f"*.{each}") for each in patterns)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % SIZE_STEP == 0 and layer.out_features % SIZE_STEP == 0
