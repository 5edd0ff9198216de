"""Writes of a module into its inputs reach the caller, with gradients, at every stage."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.free_form import engine_outcome, reference_outcome
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import largest_difference

pytestmark = pytest.mark.ranks

WIDTH = 40


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@dataclass
class Pair:
    """An output that torch's pytree does not know."""

    hidden: torch.Tensor
    result: torch.Tensor


class Block(nn.Module):
    """A layer that gives its result back in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def result(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.tanh(self.linear(hidden))
        return made

    def forward(self, way: str, *given: Any, out: Any = None) -> Any:
        if way == "write":
            given[0].mul_(self.result(given[0].clone()))
        elif way == "write and return":
            return self.linear(given[0].relu_())
        elif way == "return what was written":
            return given[0].add_(self.result(given[0].clone()))
        elif way == "return an input":
            return Pair(given[0], self.result(given[0].clone()))
        elif way == "return inputs in containers":
            return {"all": [(given[0], given[1][1:])]}, self.result(given[0] + given[1])
        elif way == "raise":
            given[0][0].mul_(self.result(given[0][0].clone()))
            raise ValueError("no result")
        elif way == "write one of two names":
            given[0].mul_(0.5)
            return self.result(given[1])
        elif way == "append":
            given[0].append(self.result(given[0][-1]))
        elif way == "remove":
            return self.result(given[0].pop())
        elif way == "remove first":
            return self.result(given[0].pop(0).clone())
        elif way == "remove key":
            return self.result(out.pop("hidden"))
        elif way == "write and append":
            given[0][0] += self.result(given[0][0].clone())
            given[0].append(given[0][0])
        elif way == "write one and use its view":
            given[0].mul_(0.5)
            return self.result(given[1])
        elif way == "add one of":
            given[0][out].add_(self.result(given[1]))
        elif way == "dict":
            out["hidden"] = self.result(out["hidden"])
            out.setdefault("all", []).append(out["hidden"])
        elif way == "nested":
            given[0][0]["all"].append(self.result(given[0][1]))
        else:
            out += self.result(given[0])
        return None


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, name: str, hidden: torch.Tensor) -> Any:
        return WAYS[name](self.blocks, self.first(hidden))


def by_writing(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        block("write", hidden)
    return hidden


def by_writing_into_views(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    whole = hidden.repeat(3, 1)
    for index, block in enumerate(blocks):
        block("write", whole[4 * index : 4 * index + 4])
    return whole


def with_a_residual(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = hidden * 1.0
        hidden = block("write and return", hidden) + hidden
    return hidden


def under_two_names(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = block("write one of two names", hidden, hidden) + hidden
    return hidden


def by_a_list(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    states = [hidden]
    for block in blocks:
        block("append", states)
    assert len(states) == 4
    assert states[0] is hidden, "a list holds what its owner put into it"
    total: torch.Tensor = sum(states[1:], states[0])
    return total


def by_a_deque(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    waiting = deque([hidden, hidden * 2, hidden * 3])
    results = [block("remove", waiting) for block in blocks]
    assert not waiting
    total: torch.Tensor = sum(results[1:], results[0])
    return total


def by_a_dict(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    state: dict[str, Any] = {"hidden": hidden}
    for block in blocks:
        block("dict", out=state)
    total: torch.Tensor = sum(state["all"], hidden)
    return total


def by_nested_containers(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    results: dict[str, list[torch.Tensor]] = {"all": []}
    for block in blocks:
        block("nested", (results, hidden))
    total: torch.Tensor = sum(results["all"], hidden)
    return total


def into_a_constant(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(hidden)
    for block in blocks:
        block("add", hidden, out=total)
    return total


def into_views_of_a_constant(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(12, WIDTH)
    for index, block in enumerate(blocks):
        block("add", hidden, out=whole[4 * index : 4 * index + 4])
    return whole


def beside_views_of_a_constant(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(12, WIDTH)
    for index, block in enumerate(blocks):
        block("add one of", [whole[0:4], whole[4:8], whole[8:12]], hidden, out=index)
    return whole


def with_views_of_an_input(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    total = hidden * 0.1
    for block in blocks:
        each = hidden * 1.0
        total = total + block("write one and use its view", each, each[1:2]) + each
        each = hidden * 1.0
        block("write", each, each[1:2])
        total = total + each
    return total


def from_the_front_of_a_list(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    states = [hidden * factor for factor in (1.0, 2.0, 3.0, 4.0)]
    last, total = states[-1], hidden * 0.0
    for block in blocks:
        total = total + block("remove first", states)
        states[-1].mul_(0.5)
    assert states[0] is last, "a list holds what its owner put into it"
    return total + last


def under_two_names_of_a_list(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    states = [hidden * 1.0]
    for block in blocks:
        block("write and append", states)
    assert all(state is states[0] for state in states)
    total: torch.Tensor = sum(states[1:], states[0])
    return total


def by_a_dict_that_makes_its_values(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    state: dict[str, Any] = defaultdict(list)
    for block in blocks:
        state["hidden"] = hidden
        hidden = block("remove key", out=state)
        assert not state
    return hidden


def into_what_was_written_and_returned(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = hidden * 1.0
        output = block("return what was written", hidden)
        assert output is hidden, "as without the engine"
        output.mul_(0.7)
        hidden.add_(0.1)
        hidden = hidden + 2 * output
    return hidden


def into_inputs_that_were_returned(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden = hidden * 1.0
        output = block("return an input", hidden)
        output.hidden.mul_(0.7)
        hidden = hidden + output.result
    return hidden


def into_views_of_inputs_that_were_returned(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        hidden, other = hidden * 1.0, hidden * 0.5
        state, result = block("return inputs in containers", hidden, other)
        ((same, view),) = state["all"]
        view.mul_(0.7)
        hidden.add_(0.1)
        hidden = same + other + result
    return hidden


def after_a_leaf_was_returned(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    leaf = torch.ones_like(hidden, requires_grad=True)
    total = hidden * 1.0
    for block in blocks:
        output = block("return an input", leaf)
        total = total + output.result * output.hidden
    for part in total.chunk(2):
        output = blocks[0]("return an input", part)
        total = torch.cat([total, output.result + output.hidden])
    return total


def after_a_module_raised(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
    total = hidden * 1.0
    for block in blocks:
        states = [total * 1.0]
        before = states[0]
        try:
            block("raise", states)
        except ValueError:
            states[0].mul_(0.5)
        assert states[0] is before, "a list holds what its owner put into it"
        block("append", states)
        total = states[0] + states[1]
    return total


WAYS: dict[str, Any] = {
    function.__name__: function
    for function in (
        by_writing,
        by_writing_into_views,
        with_a_residual,
        under_two_names,
        by_a_list,
        by_a_deque,
        by_a_dict,
        by_nested_containers,
        into_a_constant,
        into_views_of_a_constant,
        beside_views_of_a_constant,
        with_views_of_an_input,
        from_the_front_of_a_list,
        under_two_names_of_a_list,
        by_a_dict_that_makes_its_values,
        into_what_was_written_and_returned,
        into_inputs_that_were_returned,
        into_views_of_inputs_that_were_returned,
        after_a_leaf_was_returned,
        after_a_module_raised,
    )
}


class Loss:
    """Loss of a model used in one of the ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __call__(self, model: Any, step: int, rank: int) -> torch.Tensor:
        output: torch.Tensor = model(self.way, inputs(step, rank))
        return output.square().mean()


def differences(stage: int) -> dict[str, float]:
    found = {}
    for way in WAYS:
        reference = reference_outcome(Chain, Loss(way), 2)
        outcome = engine_outcome(Chain, Loss(way), stage, None, {})
        gaps = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(outcome.losses, reference.losses, strict=True)]
        found[way] = max(*gaps, largest_difference(outcome, reference))
    return found


@pytest.mark.parametrize("stage", with_slow_rows([1, 2, 3], quick=[3]))
def test_what_a_module_writes_into_its_inputs_reaches_the_caller(stage: int) -> None:
    for found in run_ranks(2, differences, stage):
        assert {way: gap for way, gap in found.items() if not gap < 2e-6} == {}


def keep_prompts() -> bool:
    """Pass leaves in a list of the script's own to every step."""
    model, prompts = Chain(), [torch.ones(4, WIDTH, requires_grad=True)]
    before = list(prompts)

    def loss(engine: Any, step: int, rank: int) -> torch.Tensor:
        engine.module.blocks[0]("append", prompts)
        total: torch.Tensor = prompts.pop().square().mean()
        return total

    engine_outcome(lambda: model, loss, 3, None, {})
    return len(prompts) == 1 and prompts[0] is before[0] and prompts[0].grad is not None


def test_a_list_of_leaves_keeps_them() -> None:
    assert run_ranks(2, keep_prompts) == [True, True]
