"""Gradients arrive and weights are whole when needed, whatever modules take, return or do to tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerotrain.runtime as zt
from tests.support.free_form import check_equal, config
from tests.support.ranks import run_ranks
from zerotrain.runtime.zero.hooks import Boundary, Window

WIDTH = 65  # a unit has more elements than the smallest shard, so that every rank owns some

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("each_transport")]


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Chain(nn.Module):
    """Three blocks of a kind; a subclass defines how a block is used."""

    def __init__(self, block: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        args = (WIDTH, WIDTH) if block is nn.Linear else ()
        self.blocks = nn.ModuleList(block(*args) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(self.use(block, hidden))
        return hidden

    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = block(hidden)
        return result


def squared(model: Any, step: int, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(step, rank))
    return output.square().mean()


def check(build: Any, loss: Any = squared, **options: Any) -> None:
    check_equal(
        build, loss, unit_modules=options.pop("unit_modules", [f"blocks.{i}" for i in range(3)]), **options
    )


@dataclass
class Result:
    value: torch.Tensor
    note: str = ""


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, kind: str = "dict") -> Any:
        value = self.linear(hidden)
        nested = {"deep": [{"value": value, "more": (value * 0.5, None)}]}
        return {
            "dict": {"value": value},
            "dataclass": Result(value),
            "object": Plain(value),
            "nested": nested,
        }[kind]


class WrappedChain(Chain):
    def __init__(self) -> None:
        super().__init__(Wrapped)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        hidden = torch.tanh(first(hidden, kind="dict")["value"])
        hidden = torch.tanh(second(hidden=hidden, kind="dataclass").value)
        inner = third(hidden, kind="nested")["deep"][0]
        result: torch.Tensor = (
            torch.tanh(inner["value"] + inner["more"][0]) + first(hidden, kind="object").value
        )
        return result


def test_dicts_dataclasses_objects_and_keyword_inputs() -> None:
    check(WrappedChain)


class InPlaceOnOutput(Chain):
    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = block(hidden)
        hidden += 1
        view = hidden.view(-1)
        view *= 2
        return hidden


class InPlaceOnView(Chain):
    """A linear layer's output is a view of its product if the input has three dimensions."""

    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = block(hidden.view(2, 2, WIDTH))
        assert hidden._base is not None
        hidden += 1
        hidden[:, 0] = 0.5
        return functional.relu_(hidden).view(4, WIDTH)


@pytest.mark.parametrize("build", [InPlaceOnOutput, InPlaceOnView])
def test_outputs_may_be_changed_in_place(build: type[Chain]) -> None:
    check(build)


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + 0.0 if hidden.is_leaf else hidden
        hidden += torch.sin(self.linear(hidden.clone()))
        return hidden


class InPlaceOnInput(Chain):
    def __init__(self) -> None:
        super().__init__(AddsInPlace)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2.0
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_inputs_may_be_changed_in_place() -> None:
    check(InPlaceOnInput)


class RunsTwice(Chain):
    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        once = torch.tanh(block(hidden))
        result: torch.Tensor = block(once) + block(hidden * 0.5)
        return result


def test_a_module_may_run_several_times() -> None:
    check(RunsTwice)


class Identity(Chain):
    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if block is self.blocks[1] else super().use(block, hidden)


def test_a_unit_may_be_left_out() -> None:
    check(Identity)


class FunctionalUse(Chain):
    """Weight tying as GPT code often writes it: the matrix is used outside of its module."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[0].weight
        assert isinstance(weight, nn.Parameter)
        # Before and after the module runs: backward reaches one use before its window and the other after it.
        hidden = super().forward(hidden @ weight)
        return functional.linear(hidden, weight) + hidden @ weight


def test_a_weight_may_be_used_outside_its_module() -> None:
    check(FunctionalUse)


class KeepsAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.auxiliary = torch.zeros(())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(hidden)
        self.auxiliary = self.gate(torch.tanh(result)).square().mean()
        return result


class AuxiliaryChain(Chain):
    def __init__(self) -> None:
        super().__init__(KeepsAuxiliary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        # Within a block the auxiliary loss is younger than the output, so backward reaches it first.
        loss: torch.Tensor = hidden.square().mean()
        for block in self.blocks:
            assert isinstance(block, KeepsAuxiliary)
            loss = loss + block.auxiliary
        return loss


def mean(model: Any, step: int, rank: int) -> torch.Tensor:
    output: torch.Tensor = model(inputs(step, rank))
    return output.mean()


def test_a_loss_may_be_kept_in_an_attribute() -> None:
    check(AuxiliaryChain, mean)


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight[4:], self.weight[:4]


class WeightChain(Chain):
    def __init__(self) -> None:
        super().__init__(ReturnsWeight)

    def use(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        rest, part = block()
        result: torch.Tensor = hidden[:, 4:] @ rest + hidden[:, :4] @ part
        return result


def test_a_module_may_return_its_weight() -> None:
    check(WeightChain)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(torch.tanh(self.inner(self.outer(hidden))))
        return result


def test_units_may_nest() -> None:
    check(nested_chain, unit_modules=["Nested", "blocks.0.inner", "blocks.2.inner"])


def nested_chain() -> Chain:
    return Chain(Nested)


def two_losses(model: Any, step: int, rank: int) -> torch.Tensor:
    """Run two forward passes before one backward."""
    first, second = model(inputs(step, rank)), model(inputs(step, rank) * -0.5)
    loss: torch.Tensor = first.square().mean() + (second - 1).square().mean()
    return loss


def test_two_forward_passes_before_backward() -> None:
    check(Chain, two_losses)


def exchanges_of_two_uses() -> list[str]:
    """Return units whose gradients were sent in one backward pass of a model that runs each unit twice."""
    engine, *_ = zt.initialize(
        model=RunsTwice(), config=config(3), unit_modules=["blocks.0", "blocks.1", "blocks.2"]
    )
    engine.comm.timings.clear()
    engine.backward(squared(engine, 0, 0))
    return [sample.label for sample in engine.comm.timings if sample.op == "reduce_scatter"]


def test_gradients_of_several_uses_travel_once() -> None:
    assert run_ranks(2, exchanges_of_two_uses)[0] == ["blocks.2", "blocks.1", "blocks.0"]


def overlapping_windows() -> list[str]:
    """Return states of a unit while the backward passes of two of its forward calls overlap."""
    engine, *_ = zt.initialize(model=Chain(), config=config(3), unit_modules=["blocks.0"])
    core = engine.core
    unit = next(unit for unit in core.units if unit.name == "blocks.0")
    boundary = Boundary(engine.module.get_submodule("blocks.0"), "blocks.0", [unit])
    first, second = (Window(core, boundary, is_recompute=False) for _ in range(2))
    states = []
    core.begin_backward()
    for act in (core.open_window, core.close_window):
        for window in (first, second):
            act(window)
            states.append(unit.state.name)
    core.finish_backward()
    return states


def test_a_unit_stays_whole_until_its_last_window_closes() -> None:
    assert run_ranks(2, overlapping_windows)[0] == ["BACKWARD", "BACKWARD", "BACKWARD", "SHARDED"]
