"""Check whether this CPU multiplies bf16 or fp16 matrices fast, and warn at the start where it does not.

Without AVX-512 (or AVX-NE-CONVERT; on Arm, BF16) torch has no kernel for products of bf16 on a CPU: it
computes them in scalar loops that take tens of times as long as fp32. Nothing fails, so a warning is needed.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.comm.group import Comm

NEEDS = {"bf16": "AVX-512 (or AVX-NE-CONVERT; on Arm, BF16)", "fp16": "AVX512-FP16 (or AVX-NE-CONVERT)"}
"""Narrow compute dtypes, and the instructions with which a CPU multiplies them fast."""


def cpu_multiplies_fast(dtype: str) -> bool:
    """Return whether torch uses oneDNN for products of this dtype of `NEEDS` on this CPU.

    It calls the check that torch makes before each product, so it also respects `torch.backends.mkldnn` and
    ONEDNN_MAX_CPU_ISA. A torch version without this check counts as fast.
    """
    answer = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", None)
    return answer is None or (bool(torch.backends.mkldnn.enabled) and bool(answer()))


def slow_products(config: EngineConfig, device: torch.device) -> str | None:
    """Return the warning for a configuration whose narrow dtype is slow on this CPU; None for others."""
    narrow = config.precision.product_dtype
    if device.type != "cpu" or narrow not in NEEDS or cpu_multiplies_fast(narrow):
        return None
    key = "torch_autocast" if config.precision.autocast_dtype else narrow
    return (
        f"{narrow} on this CPU ({torch.backends.cpu.get_cpu_capability()}): its matrix products take tens of "
        f"times as long as in fp32, for want of {NEEDS[narrow]}. Set {key}.enabled to false to compute in "
        "fp32, or train on CPUs that have it, or on GPUs."
    )


def warn_of_slow_products(config: EngineConfig, comm: Comm) -> None:
    """Warn once in the process, on rank 0, however many engines it makes."""
    text = slow_products(config, comm.device)
    if text is not None and comm.rank == 0:
        _warn(text)


@cache
def _warn(text: str) -> None:
    # Python's own "once" is forgotten whenever code, such as torch, catches warnings.
    warnings.warn(text, stacklevel=3)


FP8_CAPABILITY = (8, 9)
"""First compute capability of NVIDIA's GPUs with FP8 products."""


def fp8_refusal(device: torch.device) -> str | None:
    """Return why the device cannot compute FP8 products, as a rule; None where it can."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= FP8_CAPABILITY:
        return None
    needed = ".".join(map(str, FP8_CAPABILITY))
    return (
        f"needs a GPU of compute capability {needed} or newer (Ada, Hopper, Blackwell); "
        f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
    )


def scaled_product(
    a_MK: torch.Tensor, a_scale: torch.Tensor, b_NK: torch.Tensor, b_scale: torch.Tensor, *, fast_sum: bool
) -> torch.Tensor:
    """Return a b^T, `[M, N]` in bf16, of FP8 codes with fp32 scales, `[rows, 1]` or `[]`.

    On a GPU it is torch's `_scaled_mm`; `fast_sum` allows sums of less than fp32 there. A CPU multiplies the
    values of the codes in fp32 and rounds once, which is what `_scaled_mm` does there for scales by rows; for
    one scale per tensor oneDNN's reference loop takes a thousand times as long.
    """
    if a_MK.device.type == "cuda":
        return torch._scaled_mm(
            a_MK,
            b_NK.t(),
            scale_a=a_scale,
            scale_b=b_scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_sum,
        )
    return ((a_MK.float() * a_scale) @ (b_NK.float() * b_scale).t()).bfloat16()
