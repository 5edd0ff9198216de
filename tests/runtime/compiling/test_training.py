"""Training with compiled units: the losses of eager units at every stage, in one graph for all blocks, and
nothing is compiled anew after the third step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world

pytestmark = pytest.mark.ranks

IN_GRAPHS = {"enabled": True, "backend": "aot_eager", "fullgraph": True}
STEPS, SETTLED = 5, 3
CPU = {"device": "cpu"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Place and precision of a training, and what its blocks do."""

    stage: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    checkpointing: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Trained(NamedTuple):
    """Losses of training and evaluation of this rank, graphs after each step, and magnitudes of FP8."""

    losses: list[float]
    graphs: list[int]
    ranges: Any


def train(run: Run, compile: dict[str, Any]) -> Trained:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(2)
    model = TinyGPT(layers=2, checkpointing=run.checkpointing)
    settings = config(run.stage, compile=compile, **run.more)
    settings["zero_optimization"].update(run.zero)
    engine, *_ = zt.initialize(model=model, config=settings)
    before = counters["stats"]["unique_graphs"]
    losses, graphs = [], []
    for tokens, targets in token_batches(STEPS, size=8):
        part = (tokens.chunk(world()[1])[world()[0]], targets.chunk(world()[1])[world()[0]])
        loss = engine(*part)
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            losses += [loss.item(), engine(*part).item()]
        engine.train()
        graphs.append(counters["stats"]["unique_graphs"] - before)
    ranges = None if engine.core.fp8 is None else engine.core.fp8.ranges()
    engine.close()
    assert not engine.is_compiled
    assert not any("forward" in vars(module) for module in model.modules())
    return Trained(losses, graphs, ranges)


def trained_after_compile(run: Run) -> tuple[Trained, Trained]:
    """Train as the configuration compiles, and as `engine.compile` does."""
    made: Any = zt.initialize
    of_call = {"backend": "aot_eager", "compile_kwargs": {"fullgraph": True, "dynamic": None}}

    def initialize(**given: Any) -> tuple[Any, ...]:
        engine, *rest = made(**given)
        assert not engine.is_compiled
        engine.compile(**of_call)
        assert engine.is_compiled
        engine.compile(**of_call)
        return engine, *rest

    first = train(run, IN_GRAPHS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zt, "initialize", initialize)
        return first, train(run, {"enabled": False})


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_compiled_later_trains_as_one_compiled_at_the_start(stage: int) -> None:
    for first, later in run_ranks(2, trained_after_compile, Run(stage=stage)):
        assert later == first
        assert later.graphs[-1] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schedule": [(0, [])]}, r"schedule of compile\(\) must be None"),
        ({"compiled_autograd_enabled": True}, r"compiled_autograd_enabled of compile\(\) must be False"),
        ({"compile_kwargs": {"mode": "max-autotune"}}, r"compile\.mode.*fixed addresses"),
        ({"compile_kwargs": {"cudagraphs": True}}, r"compile\.cudagraphs"),
        ({"backend": "no-such"}, r"compile\.backend.*Name one of"),
    ],
)
def test_what_an_engine_cannot_compile_is_refused(arguments: dict[str, Any], words: str) -> None:
    engine, *_ = zt.initialize(model=nn.Linear(2, 2), config=config(0))
    with pytest.raises(ValueError, match=words):
        engine.compile(**arguments)
    engine.compile(compile_kwargs={"disable": True})
    assert not engine.is_compiled
    engine.close()


def trainings(runs: list[tuple[Run, bool]]) -> list[Trained]:
    """Train each run, compiled or not."""
    return [train(run, IN_GRAPHS if is_compiled else {"enabled": False}) for run, is_compiled in runs]


RUNS = [
    *(Run(stage=stage) for stage in range(4)),
    Run(stage=2, zero={"offload_optimizer": CPU}),
    Run(stage=3, zero={"offload_optimizer": CPU, "offload_param": CPU}),
    Run(stage=3, checkpointing="saved"),
    Run(stage=3, checkpointing="reentrant"),
]


def test_every_stage_has_the_losses_of_eager_units_and_compiles_at_the_start_alone() -> None:
    eager, *found = run_ranks(2, trainings, [(Run(), False), *((run, True) for run in RUNS)])[0]
    assert set(eager.graphs) == {0}
    for run, compiled in zip(RUNS, found, strict=True):
        assert np.allclose(eager.losses, compiled.losses, rtol=0, atol=1e-6), run
        assert compiled.graphs[SETTLED - 1] == compiled.graphs[-1], run
        # All blocks share a graph for training and one for evaluation; a reentrant checkpoint runs the first
        # forward without gradients, too.
        assert 2 <= compiled.graphs[-1] <= 3, run


BF16 = {"bf16": {"enabled": True}}
FP8 = {"enabled": True, "recipe": "tensorwise", "weight_gradient": "fp8"}
FP8_RUNS = [
    Run(stage=3, more={**BF16, "fp8": {"enabled": True}}),
    Run(stage=1, checkpointing="saved", more={**BF16, "fp8": FP8}),
]


@pytest.mark.slow(
    cheaper="tests/runtime/compiling/test_training.py::test_every_stage_has_the_losses_of_eager_units_and_compiles_at_the_start_alone"
)
def test_products_in_fp8_and_their_magnitudes_are_those_of_eager_units() -> None:
    found = run_ranks(1, trainings, [(run, how) for run in FP8_RUNS for how in (False, True)])[0]
    for run, eager, compiled in zip(FP8_RUNS, found[::2], found[1::2], strict=True):
        assert np.allclose(eager.losses, compiled.losses, rtol=0, atol=1e-6), run
        assert eager.ranges == compiled.ranges
        assert compiled.graphs[SETTLED - 1] == compiled.graphs[-1] == 2, run


class Numbered(nn.Module):
    """A block that computes with its number, so that no two have the same graph."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(40, 40)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) + 0.01 * self.number


class Numbers(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Numbered, range(blocks)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def with_inductor() -> list[list[float]]:
    return [train(Run(stage=3), compile).losses for compile in ({}, {"enabled": True})]


@pytest.mark.slow(
    cheaper="tests/runtime/compiling/test_training.py"
    "::test_every_stage_has_the_losses_of_eager_units_and_compiles_at_the_start_alone"
)
def test_generated_code_has_the_losses_of_eager_units() -> None:
    eager, compiled = run_ranks(2, with_inductor)[0]
    assert np.allclose(eager, compiled, rtol=1e-5, atol=0)


def graphs_of_numbered(blocks: int) -> int:
    from torch._dynamo.utils import counters

    settings = config(3, compile={"enabled": True, "backend": "eager"})
    engine, *_ = zt.initialize(model=Numbers(blocks), config=settings)
    before = counters["stats"]["unique_graphs"]
    for size, grows in ((2, True), (2, False), (3, True), (3, False)):
        with torch.set_grad_enabled(grows):
            engine(torch.ones(size, 40))
    return int(counters["stats"]["unique_graphs"] - before)


def test_blocks_that_differ_are_all_compiled() -> None:
    """torch.compile gives up after eight graphs of one function, which all blocks share."""
    assert run_ranks(1, graphs_of_numbered, 10) == [40]
