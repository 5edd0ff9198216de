"""Buffers at the start: every rank takes rank 0's values, whatever their strides and dtype.

Ranks with different buffers are refused by name before any value is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.buffers import DTYPES, bits_of, noise, sgd
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.strided import plain


class Buffers(nn.Module):
    """A model with one buffer of every kind, filled from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("expanded", noise(seed, 1).expand(1000))
        self.register_buffer("expanded_rows", noise(seed, 1, 5).expand(7, 5))
        self.register_buffer("transposed", noise(seed, 3, 4).t())
        self.register_buffer("every_other", noise(seed, 9)[::2])
        self.register_buffer("window", noise(seed, 9).unfold(0, 3, 1))
        self.register_buffer("scalar", noise(seed, 1)[0])
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("none", None)
        self.register_buffer("scratch", noise(seed, 6), persistent=False)
        self.register_buffer("conjugate", torch.complex(noise(seed, 4), noise(seed + 1, 4)).conj())
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.get_buffer("transposed"))
        for name, dtype in DTYPES.items():
            self.register_buffer(f"of_{name}", bits_of(seed, dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs)
        return hidden


def started(stage: int) -> dict[str, bytes]:
    rank, _ = world()
    model = Buffers(seed=rank)
    zt.initialize(model=model, config=sgd(stage))
    assert model.get_buffer("inner.shared") is model.get_buffer("transposed")
    assert model.get_buffer("expanded").stride() == (0,)  # still one element of memory
    return contents(model)


def contents(model: nn.Module) -> dict[str, bytes]:
    return {
        name: plain(buffer).view(-1).view(torch.uint8).numpy().tobytes()
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 3), (3, 1), (4, 2)])
def test_every_rank_takes_rank_0s_values(world_size: int, stage: int) -> None:
    expected = contents(Buffers(seed=0))
    for found in run_ranks(world_size, started, stage):
        assert found == expected


class Partial(nn.Module):
    """A model whose buffer is expanded on rank 0 alone, or on all other ranks alone."""

    def __init__(self, *, is_expanded: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        values = noise(3, 1).expand(6) if is_expanded else noise(4, 6)
        self.register_buffer("table", values)


def expanded_on_one(is_first: bool) -> list[float]:
    rank, _ = world()
    model = Partial(is_expanded=(rank == 0) is is_first)
    zt.initialize(model=model, config=sgd(1))
    return list(model.get_buffer("table").tolist())


@pytest.mark.ranks
@pytest.mark.parametrize("is_first", [True, False])
def test_views_that_differ_between_ranks_hold_the_same_values(is_first: bool) -> None:
    expected = Partial(is_expanded=is_first).get_buffer("table").tolist()
    assert run_ranks(2, expanded_on_one, is_first) == [expected, expected]


def one_buffer(value: torch.Tensor | None, name: str = "table", *, persistent: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    if value is not None:
        model.register_buffer(name, value, persistent=persistent)
    return model


def twice(*, is_shared: bool) -> nn.Module:
    model, value = nn.Sequential(nn.Linear(8, 8), nn.Identity()), torch.ones(4)
    model.register_buffer("table", value)
    model[1].register_buffer("table", value if is_shared else value.clone())
    return model


OTHERS: Mapping[str, tuple[Callable[[int], nn.Module], str]] = {
    "dtype": (
        lambda rank: one_buffer(torch.ones(4, dtype=torch.int32 if rank else torch.float32)),
        "buffer 'table' differs between ranks: torch.float32 of shape [4] on rank 0, torch.int32 of shape "
        "[4] on rank 1",
    ),
    "longer on rank 0": (
        lambda rank: one_buffer(torch.ones(4 if rank else 8)),
        "torch.float32 of shape [8] on rank 0, torch.float32 of shape [4] on rank 1",
    ),
    "same bytes": (
        lambda rank: one_buffer(torch.ones((2, 4) if rank else (8,))),
        "torch.float32 of shape [8] on rank 0, torch.float32 of shape [2, 4] on rank 1",
    ),
    "absent on rank 0": (
        lambda rank: one_buffer(torch.ones(4) if rank else None),
        "buffer 'table' differs between ranks: absent on rank 0, torch.float32 of shape [4] on rank 1",
    ),
    "absent on rank 1": (lambda rank: one_buffer(None if rank else torch.ones(4)), "absent on rank 1"),
    "another name": (
        lambda rank: one_buffer(torch.ones(4), "other" if rank else "table"),
        "buffer 'other' differs between ranks: absent on rank 0",
    ),
    "saved": (
        lambda rank: one_buffer(torch.ones(4), persistent=rank == 0),
        "persistent, a tensor of its own on rank 0, torch.float32 of shape [4], not persistent",
    ),
    "shared": (
        lambda rank: twice(is_shared=rank == 0),
        "the same tensor as '1.table' on rank 0, torch.float32 of shape [4], persistent, a tensor of its own "
        "on rank 1",
    ),
    "sparse": (
        lambda rank: one_buffer(torch.eye(4).to_sparse()),
        "buffer 'table' has layout torch.sparse_coo",
    ),
    "quantized on rank 1": (
        lambda rank: one_buffer(
            torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8) if rank else torch.ones(4)
        ),
        "buffer 'table' has dtype torch.quint8, which a checkpoint cannot hold",
    ),
}


def refusals() -> dict[str, str]:
    rank, _ = world()
    found = {}
    for name, (build, _) in OTHERS.items():
        model = build(rank)
        before = contents(model) if name not in ("sparse", "quantized on rank 1") else {}
        with pytest.raises(LayoutError) as caught:
            zt.initialize(model=model, config=sgd(1))
        found[name] = str(caught.value)
        if before:
            assert contents(model) == before
    return found


@pytest.mark.ranks
def test_other_buffers_are_refused_by_name_on_every_rank() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    for name, (_, text) in OTHERS.items():
        assert text in first[name], name


def in_another_order() -> dict[str, Any]:
    rank, _ = world()
    model = nn.Sequential(nn.Linear(8, 8))
    for name in ("a", "b") if rank else ("b", "a"):
        model.register_buffer(name, torch.full((3,), float(rank) + ord(name)))
    zt.initialize(model=model, config=sgd(1))
    return {name: buffer.tolist() for name, buffer in sorted(model.named_buffers())}


@pytest.mark.ranks
def test_the_order_of_registration_does_not_matter() -> None:
    expected = {"a": [97.0] * 3, "b": [98.0] * 3}
    assert run_ranks(2, in_another_order) == [expected, expected]


class Computed(nn.Module):
    """A model that computes its buffers like constructors of transformers, without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        angles = torch.outer(torch.arange(4.0), 10.0 ** -torch.arange(0.0, 1.0, 0.25))
        phases = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("phases", phases)
        self.register_buffer("conjugate", phases.conj())
        self.register_buffer("negative", phases.conj().imag)
        self.register_buffer("expanded", (torch.ones(1) * 3).expand(5))
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("packed", torch.arange(6.0).to(torch.float8_e4m3fn))
        self.register_buffer("tokens", torch.arange(6).to(torch.uint16))


@pytest.mark.unit
def test_deferred_buffers_are_computed_as_they_would_have_been() -> None:
    expected = contents(Computed())
    with zt.init_context():
        models = [Computed(), Computed()]
    assert contents(zt.materialize(models[0])) == expected
    zt.initialize(model=models[1], config=sgd(3))
    assert contents(models[1]) == expected


@pytest.mark.unit
def test_what_cannot_be_saved_is_refused_on_one_rank_too() -> None:
    for value, text in (
        (torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "dtype torch.qint8"),
        (nn.parameter.UninitializedBuffer(), "is lazy"),
    ):
        with pytest.raises(LayoutError, match=f"buffer 'table' .*{text}"):
            zt.initialize(model=one_buffer(value), config=sgd(0))
