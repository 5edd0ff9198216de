"""Inputs for the native update kernels, and their result in float64. Used by tests/native."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerotrain.runtime import _native

RULES = ("adamw", "adam", "adagrad", "lion")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HYPER: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
GRAD_SCALE = 0.37


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Tensors that one update reads and writes; `remainder` replaces `master` if there is one."""

    master: torch.Tensor
    states: list[torch.Tensor]
    grad: torch.Tensor
    weight: torch.Tensor | None

    def copy(self) -> Arrays:
        weight = None if self.weight is None else self.weight.clone()
        states = [state.clone() for state in self.states]
        return Arrays(master=self.master.clone(), states=states, grad=self.grad.clone(), weight=weight)

    def part(self, start: int, stop: int) -> Arrays:
        """Return elements `[start, stop)` in the same memory."""
        weight = None if self.weight is None else self.weight[start:stop]
        states = [state[start:stop] for state in self.states]
        return Arrays(
            master=self.master[start:stop], states=states, grad=self.grad[start:stop], weight=weight
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        every = [self.master, *self.states, self.grad]
        return every if self.weight is None else [*every, self.weight]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same_bits(one: Arrays, other: Arrays) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one.tensors, other.tensors, strict=True))


def make_arrays(
    rule: str, size: int, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None, *, seed: int = 0
) -> Arrays:
    generator = torch.Generator().manual_seed(seed + size)
    master = torch.randn(size, generator=generator)
    moment = torch.randn(size, generator=generator) * 1e-2
    squares = torch.rand(size, generator=generator) * 1e-3
    states = {"adagrad": [squares], "lion": [moment]}.get(rule, [moment, squares])
    grad = torch.randn(size, generator=generator).to(grad_dtype)
    weight = None if weight_dtype is None else torch.full((size,), 7.0, dtype=weight_dtype)
    return Arrays(master=master, states=states, grad=grad, weight=weight)


def wild_arrays(rule: str, grad_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> Arrays:
    """Return every exponent, both signs, zeros, subnormals, infinities and NaN, in many combinations."""
    generator = torch.Generator().manual_seed(5)
    size = 30_000
    random = torch.randint(-(2**31), 2**31, (4, size), generator=generator, dtype=torch.int64)
    values = random.to(torch.int32).view(torch.float32)
    plain = make_arrays(rule, size, grad_dtype, weight_dtype)
    states = [values[1], values[2].abs()] if len(plain.states) == 2 else [values[1].abs()]
    grad = values[3].to(grad_dtype)
    if grad_dtype != torch.float32:
        grad = random[3].to(torch.int16).view(grad_dtype)  # every pattern, signalling NaN too
    return replace(plain, master=values[0].clone(), states=[s.clone() for s in states], grad=grad)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 into (bf16, int16), rounded half up, with plain 64-bit integers."""
    whole = values.view(torch.int32).to(torch.int64)
    high = (whole + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (whole - (high << 16)).to(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Join (bf16, int16) to fp32."""
    whole = (high.view(torch.int16).to(torch.int64) << 16) + low.to(torch.int64)
    return ((whole + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


def as_remainders(arrays: Arrays) -> Arrays:
    """Return the same masters as bf16 weight and remainder."""
    high, low = split(arrays.master)
    return replace(arrays.copy(), master=low, weight=high.clone())


def update_(arrays: Arrays, rule: str, *, threads: int = 1, isa: str = "", **hyper: Any) -> None:
    """Update all elements by one step with `HYPER`."""
    segment = _native.Segment(0, arrays.grad.numel(), **(HYPER | hyper))
    task = _native.UpdateTask(rule, [segment], arrays.grad, arrays.weight, grad_scale=GRAD_SCALE)
    _native.update_(task, arrays.master, arrays.states, threads=threads, isa=isa)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Expected values in float64, and the size of the largest term of each sum."""

    master: torch.Tensor
    master_terms: torch.Tensor
    states: list[torch.Tensor]
    state_terms: list[torch.Tensor]


def _largest(*terms: torch.Tensor) -> torch.Tensor:
    return torch.stack([term.abs() for term in terms]).amax(dim=0)


def in_float64(arrays: Arrays, rule: str, **changes: Any) -> Wanted:
    """Compute the formulas of the papers in float64."""
    h = HYPER | {"bias_correction": True, "lr_decay": 0.0, "initial_sum": 0.0} | changes
    p, g = arrays.master.double(), arrays.grad.double() * GRAD_SCALE
    states = [state.double() for state in arrays.states]
    decay = h["weight_decay"] * p if rule in ("adam", "adagrad") else torch.zeros_like(p)
    size = _largest(g, decay)
    g = g + decay
    kept = p * (1 - h["lr"] * h["weight_decay"]) if rule in ("adamw", "lion") else p
    if rule == "adagrad":
        start = h["initial_sum"] if h["step"] == 1 else 0.0
        total = states[0] + start + g * g
        rate = h["lr"] / (1 + (h["step"] - 1) * h["lr_decay"])
        denominator = total.sqrt() + h["eps"]
        master, moved = kept - rate * g / denominator, rate * size / denominator
        return Wanted(
            master=master,
            master_terms=_largest(p, master, moved),
            states=[total],
            state_terms=[_largest(total, size * size)],
        )
    m = states[0]
    if rule == "lion":
        mixed = h["beta1"] * m + (1 - h["beta1"]) * g
        master = kept - h["lr"] * mixed.sign()
        m_new = h["beta2"] * m + (1 - h["beta2"]) * g
        moved = torch.full_like(p, h["lr"])
        terms = [_largest(m, g)]
        return Wanted(
            master=master, master_terms=_largest(p, master, moved), states=[m_new], state_terms=terms
        )
    m_new = h["beta1"] * m + (1 - h["beta1"]) * g
    v_new = h["beta2"] * states[1] + (1 - h["beta2"]) * g * g
    bias1, bias2 = (
        (1 - h[beta] ** h["step"]) if h["bias_correction"] else 1.0 for beta in ("beta1", "beta2")
    )
    denominator = v_new.sqrt() / math.sqrt(bias2) + h["eps"]
    rate = h["lr"] / bias1
    master, moved = kept - rate * m_new / denominator, rate * _largest(m, size) / denominator
    return Wanted(
        master=master,
        master_terms=_largest(p, master, moved),
        states=[m_new, v_new],
        state_terms=[_largest(m, size), _largest(v_new, size * size * (1 - h["beta2"]))],
    )


def ulps(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> float:
    """Return the largest error in units of the last place of the largest term.

    If terms cancel, the result is small, but no float32 sum can have a smaller error than its terms.
    """
    size = _largest(want, terms).float()
    spacing = torch.nextafter(size, torch.tensor(float("inf"))) - size
    return float(((got.double() - want).abs() / spacing.double()).max())
