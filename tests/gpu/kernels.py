"""Our kernels on this machine's GPU: equal to their references, and their speed beside that of a copy.

`python3 -m tests.gpu.kernels` needs torch and the native build, takes less than a minute, prints a table and
one line of JSON, and fails if a kernel differs. Without a GPU it runs the kernels' host build, on small
tensors.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerotrain.runtime import _native
from zerotrain.runtime.comm import sums as torch_sums
from zerotrain.runtime.kernels import adam, check, device, quantize, sums
from zerotrain.runtime.kernels.adam import AdamArrays
from zerotrain.runtime.offload.states import Block
from zerotrain.runtime.optim.fused import FusedKernel
from zerotrain.runtime.optim.groups import Hyper
from zerotrain.runtime.optim.rules import AdamRule
from zerotrain.runtime.optim.update import Segment, UnitUpdate
from zerotrain.runtime.zero.quantize import INT4, INT8, Quantizer
from zerotrain.runtime.zero.rounding import split
from zerotrain.runtime.zero.state import EXP_AVG, EXP_AVG_SQ

ROUNDS = 15
HYPER = Hyper(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.0)


@dataclass(slots=True)
class Bench:
    """Measurements of one run; `copy` is in bytes per second."""

    kernels: _native.Kernels
    on: torch.device
    copy: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        return self.on.type == "cuda"

    def numel(self, on_gpu: int) -> int:
        return on_gpu if self.has_gpu else 64 * 256

    def time(self, run: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Return the median milliseconds of a call on the device."""
        if not self.has_gpu:
            run()
            return 0.0
        for _ in range(2):
            run()
        found: list[float] = []
        for _ in range(rounds):
            begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)

    def measure_copy(self) -> None:
        source = torch.randn(self.numel(1 << 28), device=self.on)
        target = torch.empty_like(source)
        ms = self.time(lambda: target.copy_(source))
        self.copy = 2 * source.nbytes / ms * 1e3 if ms else 0.0
        print(f"copy: {self.copy / 1e9:.0f} GB/s")

    def row(
        self, what: str, num_bytes: int, ours: Callable[[], object], today: Callable[[], object] | None
    ) -> None:
        """Measure a kernel that must move `num_bytes`, and what the engine did before."""
        before = self.kernels.launches
        ours()
        launches = self.kernels.launches - before
        ms = self.time(ours)
        old = self.time(today, rounds=5) if today else 0.0
        speed = num_bytes / ms * 1e3 if ms else 0.0
        found = {
            "what": what,
            "ms": round(ms, 4),
            "GBps": round(speed / 1e9),
            "of_copy": round(speed / self.copy, 3) if self.copy else 0.0,
            "torch_ms": round(old, 4),
            "launches": launches,
        }
        self.rows.append(found)
        print(
            f"{what:52s} {ms:8.3f} ms {speed / 1e9:6.0f} GB/s {found['of_copy']:6.3f} of copy, "
            f"torch {old:8.3f} ms, {launches} launches",
            flush=True,
        )


def bench_sums(bench: Bench) -> None:
    for ranks, overwrite in ((2, True), (8, True), (8, False), (64, True)):
        bench_sum(bench, ranks, overwrite=overwrite)
    flats = [torch.randn(bench.numel(1 << 28), device=bench.on)]
    bench.row(
        "squares of one fp32 tensor",
        flats[0].nbytes,
        lambda: sums.square_sums(bench.kernels, flats),
        lambda: torch_sums._by_rows(flats[0]),
    )


def bench_sum(bench: Bench, ranks: int, *, overwrite: bool) -> None:
    numel = bench.numel((1 << 29) // (ranks + 2)) // 2048 * 2048
    parts = torch.randn(ranks, numel, device=bench.on, dtype=torch.bfloat16)
    into, rows = torch.zeros(numel, device=bench.on), list(parts)
    squares = torch.zeros(1, dtype=torch.float64, device=bench.on)

    def ours(square: torch.Tensor | None = squares) -> None:
        sums.sum_parts(bench.kernels, into, rows, 1 / ranks, overwrite=overwrite, squares=square)

    def today() -> None:
        first, *rest = rows
        if overwrite:
            into.copy_(first).mul_(1 / ranks)
        for part in rest if overwrite else rows:
            into.add_(part, alpha=1 / ranks)

    num_bytes = parts.nbytes + into.nbytes * (1 if overwrite else 2)
    kind = "overwrite" if overwrite else "add"
    bench.row(f"sum of {ranks} bf16 parts, {kind}, squares", num_bytes, ours, today)
    bench.row(f"sum of {ranks} bf16 parts, {kind}", num_bytes, lambda: ours(None), None)


def bench_quantize(bench: Bench) -> None:
    for quantizer in (INT8, INT4):
        for dtype in (torch.bfloat16, torch.float32):
            bench_pack(bench, quantizer, dtype)
        for ranks in (8, 64):
            bench_unpack_sum(bench, quantizer, ranks)


def bench_pack(bench: Bench, quantizer: Quantizer, dtype: torch.dtype) -> None:
    numel, bits, kernels = bench.numel(1 << 29), quantizer.bits, bench.kernels
    values = torch.randn(numel, device=bench.on, dtype=dtype)
    packed = torch.zeros(quantizer.packed_bytes(numel), dtype=torch.uint8, device=bench.on)
    back, runs = torch.empty_like(values), values.view(1, 1, -1)
    rows = back.view(1, -1)
    num_bytes, name = values.nbytes + packed.nbytes, f"int{bits}, {str(dtype).removeprefix('torch.')}"
    bench.row(
        f"pack {name}",
        num_bytes,
        lambda: quantize.pack(kernels, runs, packed, bits=bits),
        lambda: quantizer._pack_row(values, packed),
    )
    bench.row(
        f"unpack {name}",
        num_bytes,
        lambda: quantize.unpack(kernels, packed, rows, bits=bits),
        lambda: quantizer._unpack_row(packed, back),
    )


def bench_unpack_sum(bench: Bench, quantizer: Quantizer, ranks: int) -> None:
    share, bits = bench.numel(1 << 30) // ranks, quantizer.bits
    packed = torch.zeros(ranks, quantizer.packed_bytes(share), dtype=torch.uint8, device=bench.on)
    quantize.pack(bench.kernels, torch.randn(ranks, 1, share, device=bench.on), packed, bits=bits)
    total, spare = torch.empty(share, device=bench.on), torch.empty(share, device=bench.on)

    def today() -> None:
        total.zero_()
        for one in packed:
            quantizer._unpack_row(one, spare)
            total.add_(spare)

    bench.row(
        f"unpack and sum {ranks} rows of int{bits}",
        packed.nbytes + total.nbytes,
        lambda: quantize.unpack_sum(bench.kernels, packed, total, rows=ranks, bits=bits),
        today,
    )


def adam_arrays(numel: int, on: torch.device, grad: torch.dtype, weight: str) -> AdamArrays:
    master = torch.randn(numel, device=on)
    low = None
    high = None if weight == "none" else master.bfloat16()
    if weight == "remainder":
        high, low = split(master)
    segment = _native.Segment(0, numel, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    return AdamArrays(
        segments=[segment],
        master=None if low is not None else master,
        remainder=low,
        first=torch.randn(numel, device=on) * 1e-2,
        second=torch.rand(numel, device=on) * 1e-3,
        grad=torch.randn(numel, device=on).to(grad),
        weight=high,
    )


def torch_update(unit: AdamArrays) -> Callable[[], None]:
    """Return the update by the kernel of torch, as the engine launches it."""
    numel = unit.first.numel()
    assert unit.weight is not None or unit.master is not None
    segments = [Segment(start=0, stop=numel, hyper=HYPER, step=3)]
    grads, weights = unit.grad.float(), unit.weight if unit.weight is not None else unit.master
    assert weights is not None
    block = Block(
        start=0, stop=numel, master=unit.master, remainder=unit.remainder,
        by_kind={EXP_AVG: unit.first, EXP_AVG_SQ: unit.second}, weight=unit.weight,
    )  # fmt: skip

    def run() -> None:
        kernel = FusedKernel(
            AdamRule(), UnitUpdate(segments=segments, grads=grads, grad_scale=0.999, weights=weights)
        )
        kernel.run(block)

    return run


def bench_adam(bench: Bench) -> None:
    factor = torch.full((1,), 0.999, dtype=torch.float64, device=bench.on)
    for grad in (torch.float32, torch.bfloat16):
        for weight in ("none", "bf16", "remainder"):
            unit = adam_arrays(bench.numel(1 << 26), bench.on, grad, weight)
            name = f"AdamW, {str(grad).removeprefix('torch.')} gradients, {weight} weights"
            bench_update(bench, name, [unit], factor)
    units = [adam_arrays(4 * 2048, bench.on, torch.float32, "bf16") for _ in range(64)]
    bench_update(bench, "AdamW, 64 units of 8,192 elements in one call", units, factor)


def bench_update(bench: Bench, name: str, units: list[AdamArrays], factor: torch.Tensor) -> None:
    num_bytes = 0
    for unit in units:
        num_bytes += sum(2 * one.nbytes for one in unit.tensors) - unit.grad.nbytes
        if unit.weight is not None and unit.remainder is None:
            num_bytes -= unit.weight.nbytes  # only written
    olds = [torch_update(unit) for unit in units]
    bench.row(
        name,
        num_bytes,
        lambda: adam.update(bench.kernels, "adamw", units, factor=factor),
        lambda: [old() for old in olds],
    )


def check_large(bench: Bench) -> None:
    """Check tensors of more elements than 32 bits count."""
    if not bench.has_gpu or torch.cuda.get_device_properties(bench.on).total_memory < 40 << 30:
        return
    numel, tail = (1 << 31) + (1 << 20) + 256, slice(-5000, None)
    parts = [torch.full((numel,), value, dtype=torch.bfloat16, device=bench.on) for value in (1.0, 2.0)]
    into, squares = torch.zeros(numel, device=bench.on), torch.zeros(1, dtype=torch.float64, device=bench.on)
    sums.sum_parts(bench.kernels, into, parts, 1.0, overwrite=True, squares=squares)
    assert float(squares) == 9.0 * numel, float(squares) / numel
    assert bool((into[tail] == 3.0).all())
    assert bool((into[:5000] == 3.0).all())
    packed = torch.zeros(INT8.packed_bytes(numel), dtype=torch.uint8, device=bench.on)
    parts[1][tail] = 4.0
    quantize.pack(bench.kernels, parts[1].view(1, 1, -1), packed, bits=8)
    quantize.unpack(bench.kernels, packed, parts[0].view(1, -1), bits=8)
    assert bool((parts[0][tail] == 4.0).all())
    assert bool((parts[0][:5000] == 2.0).all())
    print("more than 2^31 elements: right")


def host_microseconds(bench: Bench) -> dict[str, float]:
    """Return the host's time for a call on small tensors, which launches must not wait for."""
    unit = adam_arrays(2048, bench.on, torch.float32, "bf16")
    parts = list(torch.randn(8, 2048, device=bench.on))
    calls: dict[str, Callable[[], object]] = {
        "adam": lambda: adam.update(bench.kernels, "adamw", [unit]),
        "sum": lambda: sums.sum_parts(bench.kernels, unit.first, parts, 1.0, overwrite=True),
        "sum of torch": lambda: [unit.first.add_(part, alpha=0.5) for part in parts],
    }
    found = {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        for _ in range(200):
            call()
        found[name] = round((time.perf_counter() - began) / 200 * 1e6, 1)
        if bench.has_gpu:
            torch.cuda.synchronize()
    return found


def main() -> int:
    on = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    began = time.perf_counter()
    if on.type == "cuda":
        torch.zeros(1, device=on)
        print(torch.cuda.get_device_name(), "driver", _native.driver_version())
        kernels = _native.device_kernels(device.read_image(_native), 0)
    else:
        kernels = _native.host_kernels()
    loaded = time.perf_counter()
    refused = check.refusals(kernels, on)
    again = time.perf_counter()
    check.refusals(kernels, on)
    took = [round(1e3 * ms) for ms in (loaded - began, again - loaded, time.perf_counter() - again)]
    print(f"load {took[0]} ms, check {took[1]} ms, again {took[2]} ms; refused: {refused or 'nothing'}")
    bench = Bench(kernels, on)
    bench.measure_copy()
    for part in (bench_sums, bench_adam, bench_quantize, check_large):
        part(bench)
        if bench.has_gpu:
            torch.cuda.empty_cache()
    host = host_microseconds(bench)
    print("host microseconds per call:", host)
    result = {
        "copy_GBps": round(bench.copy / 1e9),
        "refused": {family.value: text for family, text in refused.items()},
        "check_ms": took,
        "host_us": host,
        "rows": bench.rows,
    }
    print(json.dumps(result))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
