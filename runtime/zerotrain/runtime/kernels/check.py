"""The first check of a device: every kernel against its reference, bit for bit, with awkward inputs.

References are the native CPU kernels for sums and updates, and the kernels' host build for quantisation;
CI compares the host build with all others. Inputs have tails, unaligned starts, empty runs, infinities and
NaN; half of the calls are on a stream of their own, behind other work of that stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import torch

from zerotrain.runtime._native import (
    Kernels,
    Segment,
    UpdateTask,
    accumulate_,
    host_kernels,
    sum_squares,
    update_,
)
from zerotrain.runtime.kernels import adam, quantize, sums
from zerotrain.runtime.kernels.adam import AdamArrays
from zerotrain.runtime.kernels.device import Family

SQUARES_WITHIN = 1e-6
_BUSY_CYCLES = 20_000
_BLOCK, _BLOCKS = 256, 35
_FACTOR = 0.37
_CPU = torch.device("cpu")


class Differs(Exception):
    """A kernel's result is not its reference's."""


@torch.no_grad()
def refusals(kernels: Kernels, device: torch.device) -> dict[Family, str]:
    """Return why families must not be used on the device; an empty mapping if all of them equal their
    references."""
    checks: dict[Family, Callable[[Kernels, torch.device], None]] = {
        Family.SUMS: _check_sums,
        Family.QUANTIZE: _check_quantize,
        Family.ADAM: _check_adam,
    }
    found = {}
    for family, check in checks.items():
        try:
            with _CPU:  # whatever the program's default device is
                check(kernels, device)
        except (Differs, RuntimeError, ValueError) as error:
            found[family] = f"{family.value}: {error}"
    return found


@contextmanager
def _stream(device: torch.device, number: int) -> Iterator[None]:
    """Run on another stream for every second number, else on the current one."""
    if device.type != "cuda":
        yield
        return
    current = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device) if number % 2 else current  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@cache
def _pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1 << 17, generator=generator, dtype=torch.float32)
    values[::3] *= 1e-3
    values[1::5] *= 100.0
    return values


def _random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values of several magnitudes with two infinities and a NaN, in dtype."""
    first = seed * 1009 % 40_000
    values = _pool()[first : first + numel].clone()
    if numel > 64:
        values[torch.tensor((numel // 2, numel // 3, numel // 5))] = torch.tensor(
            (math.inf, -math.inf, math.nan), dtype=torch.float32
        )
    return values.to(dtype)


def _placed(tensor: torch.Tensor, device: torch.device, *, offset: int = 0) -> torch.Tensor:
    """Return a copy on the device that begins `offset` elements behind an aligned address. The stream writes
    it late: a kernel that did not wait for the stream would read something else."""
    place = torch.full((offset + tensor.numel(),), 7, dtype=tensor.dtype, device=device)[offset:]
    arrived = tensor.reshape(-1).to(device)
    if device.type == "cuda":
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    return place.copy_(arrived)


def _require_equal(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises Differs unless the bits are equal, or both NaN."""
    found = found.to(_CPU)
    if wanted.is_floating_point():
        # A NaN's payload has no meaning, and differs between processors.
        found, wanted = (one.masked_fill(one.isnan(), float("nan")) for one in (found, wanted))
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.element_size()]
    places = (found.contiguous().view(width) != wanted.contiguous().view(width)).nonzero()
    if len(places):
        place = tuple(places[0].tolist())
        raise Differs(f"{what}: {len(places)} of {wanted.numel()} elements differ, the first at {place}")


def _check_sums(kernels: Kernels, device: torch.device) -> None:
    shapes = ((0, 2, 0), (1, 1, 0), (4099, 3, 1), (2050, 65, 0), (70_001, 13, 3))
    cases = product((torch.float32, torch.bfloat16), (False, True), shapes)
    for number, (dtype, overwrite, (numel, parts, offset)) in enumerate(cases):
        what = f"sum of {parts} parts of {numel} elements of {dtype}, start {offset}"
        with _stream(device, number):
            _check_sum(what, kernels, device, (numel, parts, offset), dtype, overwrite=overwrite)


def _check_sum(
    what: str,
    kernels: Kernels,
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    overwrite: bool,
) -> None:
    numel, num_parts, offset = shape
    wanted, scale = _random(numel, 1), 1 / num_parts
    parts = [_random(numel, 2 + k, dtype) for k in range(num_parts)]
    found = _placed(wanted, device, offset=offset)
    placed = [_placed(part, device, offset=offset if k else 0) for k, part in enumerate(parts)]
    squares = torch.full((1,), -1.0, dtype=torch.float64, device=device)
    sums.sum_parts(kernels, found, placed, scale, overwrite=overwrite, squares=squares)
    accumulate_(wanted, parts, scale, overwrite=overwrite)
    _require_equal(what, found, wanted)
    _require_squares(f"squares of {what}", squares, sum_squares(wanted))
    finite = wanted.nan_to_num(0.0, 1.0, -1.0)
    alone = sums.square_sums(kernels, [_placed(finite, device, offset=offset)])
    _require_squares(f"squares alone, {what}", alone, sum_squares(finite))


def _require_squares(what: str, found: torch.Tensor, wanted: float) -> None:
    value, close = torch.tensor([wanted], dtype=torch.float64), found.to(_CPU)
    if not torch.allclose(close, value, rtol=SQUARES_WITHIN, atol=0.0, equal_nan=True):
        raise Differs(f"{what}: {close.item()} instead of {wanted}")


def _check_quantize(kernels: Kernels, device: torch.device) -> None:
    cases = product((8, 4), (torch.float32, torch.bfloat16, torch.float16), (0, 1))
    for number, (bits, dtype, offset) in enumerate(cases):
        with _stream(device, number):
            _check_codes(f"int{bits}, {dtype}, start {offset}", kernels, device, bits, dtype, offset)


def _check_codes(
    what: str, kernels: Kernels, device: torch.device, bits: int, dtype: torch.dtype, offset: int
) -> None:
    # One run in a row: packed rows that allow no accesses by eight bytes.
    rows, pieces, numel, host = 3, 2 - offset, _BLOCKS * _BLOCK, host_kernels()
    # Runs of a row apart from one another; blocks of zeros and of tiny values.
    values = _random(pieces * rows * numel, 3 + bits, dtype).view(pieces, rows, numel)
    values[0, 1, : 3 * _BLOCK] = 0.0
    values[-1, 2] *= 1e-38 if dtype is not torch.float16 else 1e-7
    wanted = torch.zeros(rows, pieces * _BLOCKS * (_BLOCK * bits // 8 + 4), dtype=torch.uint8)
    quantize.pack(host, values.transpose(0, 1), wanted, bits=bits)
    placed = _placed(values, device, offset=offset).view(values.shape)
    found = torch.zeros(wanted.shape, dtype=torch.uint8, device=device)
    quantize.pack(kernels, placed.transpose(0, 1), found, bits=bits)
    _require_equal(f"packed, {what}", found, wanted)

    back = torch.empty(rows, pieces * numel, dtype=dtype)
    quantize.unpack(host, wanted, back, bits=bits)
    got = torch.empty(back.numel() + offset, dtype=dtype, device=device)[offset:].view(rows, -1)
    quantize.unpack(kernels, found, got, bits=bits)
    _require_equal(f"unpacked, {what}", got, back)

    total = torch.empty(pieces * numel, dtype=torch.float32)
    quantize.unpack_sum(host, wanted, total, rows=rows, bits=bits)
    summed = torch.empty(total.numel() + offset, dtype=torch.float32, device=device)[offset:]
    quantize.unpack_sum(kernels, found, summed, rows=rows, bits=bits)
    _require_equal(f"sum of unpacked rows, {what}", summed, total)


def _segments(numel: int) -> list[Segment]:
    """Return segments with gaps, one of them empty, and more of them than one launch takes."""

    def segment(start: int, stop: int, decay: float, step: int) -> Segment:
        return Segment(start, stop, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay, step=step)

    ends = [*range(3, 303, 6), numel]
    return [
        segment(0, 0, 0.1, 1),
        *(segment(a + 1, b, 0.1 * (k % 2), 1 + k % 20) for k, (a, b) in enumerate(pairwise(ends))),
    ]


def _arrays(numel: int, grad: torch.dtype, weight: str) -> AdamArrays:
    master, first, second = _random(numel, 1), _random(numel, 2) * 1e-2, _random(numel, 3).abs()
    high = low = None
    if weight == "remainder":
        bits = master.nan_to_num(0.0, 1.0, -1.0).view(torch.int32)
        high = ((bits + 0x8000) >> 16).to(torch.int16)
        low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
        high = high.view(torch.bfloat16)
    elif weight != "none":
        high = torch.zeros(numel, dtype=getattr(torch, weight))
    return AdamArrays(
        segments=_segments(numel),
        master=master if low is None else None,
        remainder=low,
        first=first,
        second=second,
        grad=_random(numel, 4, grad),
        weight=high,
    )


def _moved(unit: AdamArrays, device: torch.device, offset: int) -> AdamArrays:
    values = {field.name: getattr(unit, field.name) for field in fields(unit)}
    moved: dict[str, Any] = {
        name: _placed(value, device, offset=offset)
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return replace(unit, **moved)


def _check_adam(kernels: Kernels, device: torch.device) -> None:
    weights = ("none", "float32", "bfloat16", "float16", "remainder")
    cases = product(("adamw", "adam"), (torch.float32, torch.bfloat16), weights)
    for number, (rule, grad, weight) in enumerate(cases):
        with _stream(device, number):
            what = f"{rule}, {grad} gradients, {weight} weights"
            _check_update(what, kernels, device, rule, _arrays(9_001, grad, weight))


def _check_update(what: str, kernels: Kernels, device: torch.device, rule: str, wanted: AdamArrays) -> None:
    """Compare two units, of which one starts at an unaligned address, with the CPU's kernel; `wanted` is
    updated, too."""
    factor = torch.full((1,), _FACTOR, dtype=torch.float64, device=device)
    nothing, bad = torch.zeros_like(factor), torch.ones_like(factor)
    units = [_moved(wanted, device, offset) for offset in (0, 3)]
    adam.update(kernels, rule, units, factor=factor, found_inf=bad)
    _require_same(f"{what}, skipped", units, wanted)
    adam.update(kernels, rule, units[:1], grad_scale=_FACTOR, found_inf=nothing)
    adam.update(kernels, rule, units[1:], factor=factor)
    task = UpdateTask(rule, wanted.segments, wanted.grad, wanted.weight, grad_scale=_FACTOR)
    first = wanted.master if wanted.remainder is None else wanted.remainder
    update_(task, first, [wanted.first, wanted.second])
    _require_same(what, units, wanted)


def _require_same(what: str, units: list[AdamArrays], wanted: AdamArrays) -> None:
    for unit in units:
        for found, one in zip(unit.tensors, wanted.tensors, strict=True):
            _require_equal(f"{what}, start at {found.storage_offset()}", found, one)
