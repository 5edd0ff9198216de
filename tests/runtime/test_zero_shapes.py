"""Sizes that divide by nothing: odd matrices, scalars, single elements, more ranks than elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.free_form import check_equal


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 16)
        self.second = nn.Linear(16, 7)
        self.third = nn.Linear(7, 15, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(hidden))))
        result: torch.Tensor = self.third(hidden) * self.scale
        return result


class OneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight + self.empty.sum()


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    output: torch.Tensor = model(torch.randn(3, 15, generator=generator))
    return (output - 1).square().mean()


def test_odd_shapes() -> None:
    check_equal(Odd, loss, world_size=2, stages=(0, 1, 2, 3), unit_modules=["first", "second", "third"])


def test_odd_shapes_on_three_ranks() -> None:
    check_equal(Odd, loss, world_size=3, stages=(2, 3), unit_modules=["Linear"])


def test_more_ranks_than_elements() -> None:
    check_equal(OneElement, loss, world_size=4, stages=(1, 3))
