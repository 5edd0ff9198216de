"""Products in FP8 on this device: their numbers beside the CPU's, and the time of a step beside bf16's.

    python3 -m tests.gpu.fp8

Prints one line of JSON per comparison. Fails where a product differs from the CPU's by more than the rounding
of sums, or where the first losses are not bf16's within 2 %. Without a GPU, sizes are small.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch

os.environ.setdefault("ZEROTRAIN_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")

import zerotrain.runtime as zt
from tests.gpu.residual import Residual
from tests.support.device import DEVICE
from zerotrain.runtime.fp8.product import E4M3, Operand, Scheme

ON_GPU = DEVICE == "cuda"
WIDTH, BLOCKS, TOKENS, WARMUP, STEPS = (4096, 8, 8192, 3, 10) if ON_GPU else (64, 2, 32, 1, 2)
CONTENDERS: dict[str, dict[str, Any]] = {
    "bf16": {"enabled": False},
    "rowwise": {"enabled": True},
    "tensorwise": {"enabled": True, "recipe": "tensorwise"},
    "rowwise+weight gradient": {"enabled": True, "weight_gradient": "fp8"},
    "tensorwise+weight gradient": {"enabled": True, "recipe": "tensorwise", "weight_gradient": "fp8"},
}
SUM_ERROR = {True: 2.0**-5, False: 2.0**-6}
"""Largest difference of a product from the CPU's, as a share of its largest element. Hopper's FP8 units keep
about 14 bits of their sums, which without fast sums are added up in fp32. So a rounding to bf16, by up to
2^-7 of an element, may go the other way."""


def main() -> None:
    for by_row, fast_sum in product((True, False), (True, False)):
        compare(Scheme(by_row=by_row, weight_gradient=False), fast_sum)
    expected: list[float] | None = None
    for name, fp8 in CONTENDERS.items():
        seconds, losses, amax = train(fp8)
        gc.collect()  # an engine is in cycles, and five at once do not fit on a GPU
        expected = expected or losses
        off = max(abs(a / b - 1.0) for a, b in zip(losses, expected, strict=True))
        print(json.dumps({"contender": name, "step_ms": seconds * 1e3, "loss_off": off, **amax}), flush=True)
        if not off <= 0.02:
            sys.exit(f"{name}: losses {losses}, of bf16 {expected}")
    for by_row in (True, False):
        compare_compiled(Scheme(by_row=by_row, weight_gradient=False))


def compare(scheme: Scheme, fast_sum: bool) -> None:
    """Compare codes, scales and the product, for e4m3 and for gradients, with those of the CPU."""
    torch.manual_seed(1)
    a, b = torch.randn(48, 4096).bfloat16(), torch.randn(64, 4096).bfloat16()
    for dtype in {E4M3, scheme.gradient_dtype}:
        ours = [scheme.quantize(each, kind) for each, kind in ((a, dtype), (b, E4M3))]
        theirs = [scheme.quantize(each.to(DEVICE), kind) for each, kind in ((a, dtype), (b, E4M3))]
        alike = all(
            one.values_RC.view(torch.uint8).equal(other.values_RC.view(torch.uint8).cpu())
            and one.scale.equal(other.scale.cpu())
            for one, other in zip(ours, theirs, strict=True)
        )
        expected = scheme.product(ours[0], ours[1]).float()
        found = scheme.product(theirs[0], theirs[1], fast_sum=fast_sum).cpu().float()
        off = float((found - expected).abs().max() / expected.abs().max())
        name = f"{'rowwise' if scheme.by_row else 'tensorwise'} {str(dtype).removeprefix('torch.')}"
        print(json.dumps({"product": name, "fast_sum": fast_sum, "codes_equal": alike, "off": off}))
        if not alike or not off <= SUM_ERROR[fast_sum]:
            sys.exit(f"{name}: codes equal {alike}, largest difference {off}")


def compare_compiled(scheme: Scheme) -> None:
    """Print the shares of codes and scales that differ where the codes are made by a compiler's kernel, whose
    division and intermediate roundings may be others."""
    compiled = torch.compile(scheme.quantize, backend="inductor" if ON_GPU else "aot_eager", dynamic=False)
    torch.manual_seed(1)
    values = torch.randn(WIDTH, WIDTH).bfloat16().to(DEVICE)
    plain, made = scheme.quantize(values, E4M3), compiled(values, E4M3)
    pairs = {
        "codes_off": (plain.values_RC.view(torch.uint8), made.values_RC.view(torch.uint8)),
        "scales_off": (plain.scale, made.scale),
    }
    off = {name: float(one.ne(other).float().mean()) for name, (one, other) in pairs.items()}
    print(json.dumps({"compiled": "rowwise" if scheme.by_row else "tensorwise", **off}), flush=True)


def train(fp8: dict[str, Any]) -> tuple[float, list[float], dict[str, float]]:
    """Return the median seconds of a step, the losses, and the largest magnitudes of the products."""
    config = {
        "train_batch_size": TOKENS,
        "bf16": {"enabled": True},
        "fp8": fp8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    with torch.device(DEVICE):  # a CPU takes most of the part's time for a billion random numbers
        model = Residual(WIDTH, BLOCKS)
    engine = zt.initialize(model=model, config=config)[0]
    torch.manual_seed(2)
    x, losses, seconds = torch.randn(TOKENS, WIDTH, device=DEVICE).bfloat16(), list[torch.Tensor](), []
    for _ in range(WARMUP + STEPS):
        start = perf_counter()
        loss = (engine(x).float() ** 2).mean()
        engine.backward(loss)
        engine.step()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
        losses.append(loss.detach())
    layers = engine.core.fp8
    amax = {} if layers is None else {each.name.lower(): layers.ranges()[each].amax for each in Operand}
    engine.close()
    return median(seconds[WARMUP:]), [float(loss) for loss in losses], amax


if __name__ == "__main__":
    main()
