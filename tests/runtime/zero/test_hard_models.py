"""Models and calls that break engines: experts that some ranks leave out, late gradients, compilation."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.forkserver import in_new_interpreter
from tests.support.free_form import check_equal, config, engine_outcome, reference_outcome
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import Outcome, largest_difference, world
from zerotrain.runtime.zero import hooks, sharded_model
from zerotrain.runtime.zero.hooks import COMPILER

pytestmark = pytest.mark.ranks


WIDTH = 40


class Moe(nn.Module):
    """A module that routes a whole batch to the experts that its caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        hidden = torch.tanh(self.gate(hidden))
        for index in chosen:
            hidden = hidden + torch.tanh(self.experts[index](hidden))
        return hidden


class MoeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.moe = Moe()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        result: torch.Tensor = self.last(self.moe(torch.tanh(self.first(inputs)), chosen)).mean()
        return result


def routed_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    """Use other experts on each rank, in another order, and sometimes one of them twice or none."""
    chosen = [((0, 1), (1,)), ((2, 0), ()), ((1, 1), (0, 1, 2))][step][rank]
    inputs = torch.arange(8.0).view(2, 4) / (1 + rank + step)
    result: torch.Tensor = model(inputs, chosen)
    return result


class Recursive(nn.Module):
    """A module that calls itself; its weights are used before that and perhaps also after it."""

    def __init__(self, *, also_after: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.also_after = also_after

    def forward(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        hidden = torch.tanh(self.inner(hidden))
        if depth == 0:
            return hidden
        deeper = self(hidden, depth - 1)
        return torch.tanh(self.inner(deeper)) + hidden if self.also_after else deeper


class RecursiveModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recursive(also_after=value) for value in (False, True))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, 3)
        result: torch.Tensor = self.last(hidden).square().mean()
        return result


def recursive_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    result: torch.Tensor = model(torch.randn(2, WIDTH, generator=generator))
    return result


def test_modules_that_call_themselves() -> None:
    check_equal(RecursiveModel, recursive_loss, stages=(2, 3), unit_modules=["Recursive"])


def outcomes(build: Any, loss: Any, settings: list[tuple[int, dict[str, Any]]]) -> list[Outcome]:
    """Run one engine after the other, so that processes start once."""
    return [engine_outcome(build, loss, stage, None, extra) for stage, extra in settings]


def check_settings(loss: Any, settings: list[tuple[int, dict[str, Any]]]) -> None:
    reference = reference_outcome(MoeModel, loss, 2)
    for found in run_ranks(2, outcomes, MoeModel, loss, settings):
        for setting, got in zip(settings, found, strict=True):
            assert largest_difference(got, reference) < 1e-5, setting
            assert np.allclose(got.norms, reference.norms, rtol=1e-4), setting


def zero(stage: int, *, overlap: bool) -> tuple[int, dict[str, Any]]:
    return stage, {"zero_optimization": {"stage": stage, "overlap_comm": overlap}}


def test_experts_that_are_units_where_weights_stay_whole() -> None:
    """Gradients are sent in one order on all ranks, whatever the routing, with zeros where there are none."""
    settings = [zero(stage, overlap=overlap) for stage in (0, 1, 2) for overlap in (False, True)]
    check_settings(routed_loss, settings)


def leaf_outcome() -> Any:
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0, "leaf_module": {"classes": ["Moe"]}}
    return engine_outcome(MoeModel, routed_loss, 3, None, {"zero_optimization": settings})


def test_a_leaf_module_makes_experts_safe_at_stage_3() -> None:
    reference = reference_outcome(MoeModel, routed_loss, 2)
    for got in run_ranks(2, leaf_outcome):
        assert largest_difference(got, reference) < 1e-5


def experts_as_units() -> None:
    os.environ["ZEROTRAIN_WATCHDOG_SECONDS"] = "2"
    engine_outcome(MoeModel, routed_loss, 3, ["moe.experts.0", "moe.experts.1", "moe.experts.2"], {})


def test_a_unit_that_only_some_ranks_run_is_an_error_at_stage_3() -> None:
    named = r"CommError: .*(moe\.experts|must call the same modules in the same order on every rank)"
    with pytest.raises(RankFailed, match=named):
        run_ranks(2, experts_as_units)


def penalised_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    """Use weights on rank 0 outside of their modules, before their use within."""
    module: Any = model.module if isinstance(model, zt.Engine) else model
    penalty = torch.zeros(())
    if rank == 0:
        penalty = sum((value.square().sum() for value in module.moe.parameters()), penalty)
    return routed_loss(model, step, rank) + 0.1 * penalty


def test_gradients_that_come_after_their_unit_was_sent() -> None:
    """One rank's late gradients reach all: the step record requests another round."""
    settings = [zero(0, overlap=True), zero(1, overlap=False), zero(1, overlap=True), zero(2, overlap=True)]
    check_settings(penalised_loss, settings)


def one_weight() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def one_weight_loss(model: Any, step: int, rank: int) -> torch.Tensor:
    result: torch.Tensor = model(torch.full((2, 1), 1.0 + step + rank)).square().mean()
    return result


def test_more_ranks_than_elements() -> None:
    check_equal(one_weight, one_weight_loss, world_size=4, stages=(0, 1, 2, 3))


def input_gradients(stage: int) -> None:
    """Call `torch.autograd.grad` for an input, without and between training steps."""
    torch.manual_seed(1)
    model = MoeModel()
    plain = MoeModel()
    plain.load_state_dict(model.state_dict())
    _, settings = zero(stage, overlap=True)
    engine, *_ = zt.initialize(model=model, config={**config(stage), **settings})
    for _ in range(2):
        inputs = torch.ones(2, 4, requires_grad=True)
        (got,) = torch.autograd.grad(engine(inputs, (0, 1)), inputs)
        (expected,) = torch.autograd.grad(plain(inputs, (0, 1)), inputs)
        assert torch.equal(got, expected)
    assert engine.memory.transient_bytes == 0
    engine.step()  # with gradients of zero only weight decay acts
    assert engine.last_step is not None
    assert engine.last_step.grad_norm == 0.0
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_inputs(stage: int) -> None:
    run_ranks(2, input_gradients, stage)


def autocast_losses(stage: int) -> tuple[list[float], list[float]]:
    """Return losses of fp32 weights under torch.autocast: the engine and the plain model."""
    rank, world_size = world()
    found = []
    for sharded in (True, False):
        torch.manual_seed(2)
        model = TinyGPT(layers=2)
        params = {"lr": 1e-2, "torch_adam": True}
        settings = {**config(stage), "optimizer": {"type": "AdamW", "params": params}}
        run: Any = model
        if sharded:
            run, *_ = zt.initialize(model=model, config=settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, foreach=False)
        losses = []
        for batch in token_batches(3, size=2 * world_size):
            if sharded:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = run(*(part.chunk(world_size)[rank] for part in batch))
                run.backward(loss)
                run.step()
                rows = run.comm.gather_record([loss.item()])
                losses.append(sum(row[0] for row in rows) / world_size)
                continue
            optimizer.zero_grad()
            total = 0.0
            for part in range(world_size):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(*(tensor.chunk(world_size)[part] for tensor in batch))
                (loss / world_size).backward()
                total += loss.item() / world_size
            optimizer.step()
            losses.append(total)
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_on_top_of_fp32_weights(stage: int) -> None:
    for got, expected in run_ranks(2, autocast_losses, stage):
        assert got == pytest.approx(expected, abs=2e-3)


def compiled_losses(is_compiled: bool) -> list[float]:
    """Return losses with blocks compiled (without a backend's code) before the engine takes the model."""
    torch.manual_seed(2)
    model = TinyGPT(layers=1)
    if is_compiled:
        model.blocks[0].compile(backend="eager")
    engine, *_ = zt.initialize(model=model, config=config(3))
    losses = []
    for tokens, targets in token_batches(2, size=2):
        rank = world()[0]
        loss = engine(tokens.chunk(2)[rank], targets.chunk(2)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_compiled_blocks_at_stage_3() -> None:
    assert run_ranks(2, compiled_losses, True) == run_ranks(2, compiled_losses, False)


def losses_without_the_compiler() -> list[float]:
    """Train with the hooks of a program that has not imported the compiler."""
    for module in (hooks, sharded_model):
        module.COMPILER = "no module"  # type: ignore[attr-defined]
    return compiled_losses(False)


def test_training_is_the_same_where_the_compiler_is_not_imported() -> None:
    assert run_ranks(2, losses_without_the_compiler) == run_ranks(2, compiled_losses, False)


def compiled_too_late() -> None:
    assert COMPILER not in sys.modules, "with the compiler imported, the hooks know of it"
    engine, *_ = zt.initialize(model=TinyGPT(layers=1), config=config(3))
    engine.module._compiled_call_impl = engine.module._call_impl  # as module.compile() leaves it
    engine(*token_batches(1, size=1)[0])


def test_a_model_compiled_after_initialize_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"before initialize\(\)"):
        in_new_interpreter(compiled_too_late)
