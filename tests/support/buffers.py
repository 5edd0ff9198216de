"""Buffers with known bits, for tests of what the engine does with them."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
}
"""Every dtype that a checkpoint can store."""


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Return normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return five elements of random bits, among them NaN with payloads."""
    generator = torch.Generator().manual_seed(seed + 100)
    if dtype is torch.bool:
        return torch.randint(0, 2, (5,), generator=generator).bool()
    raw = torch.randint(0, 256, (5 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def sgd(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    """Return a configuration with plain SGD."""
    block = {} if precision == "fp32" else {precision: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **block,
        **more,
    }
