"""Checks at the beginning of a pass hold for every entry.

Evaluations leave nothing behind, and calls of modules cost nothing more.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.facade.observer import EngineObserver
from zerotrain.runtime.zero.hooks import BoundaryHooks
from zerotrain.runtime.zero.layout import LayoutError

pytestmark = pytest.mark.ranks

LR, EPS = 1e-2, 1e-4
PHASES = (("a", "b", "c"), ("b", "c"), ("a", "c"))
"""Modules that are trained, two steps each."""


class Three(nn.Module):
    """Layers of `width` x `width`: 8 puts them all into the model's own unit, 40 makes each a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).float().square().mean()
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


def build(width: int) -> Three:
    torch.manual_seed(1)
    return Three(width)


def batch(model: Three, step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, model.width, generator=torch.Generator().manual_seed(10 * step + rank))


def set_trained(model: nn.Module, names: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in names)


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    params = {"lr": LR, "eps": EPS, "weight_decay": 0.1, "torch_adam": True}
    made = config(stage, optimizer={"type": "AdamW", "params": params})
    made["zero_optimization"].update(zero)
    return made


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with zt.full_parameters(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def reference(width: int, world_size: int) -> dict[str, torch.Tensor]:
    """Train with AdamW; freezing a parameter drops its state."""
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, foreach=False)
    for step in range(2 * len(PHASES)):
        set_trained(model, PHASES[step // 2])
        optimizer.zero_grad()
        for parameter in model.parameters():
            if not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        for rank in range(world_size):
            (model.loss(batch(model, step, rank)) / world_size).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights_of(model)


def phased(width: int, stage: int, **zero: Any) -> float:
    """Freeze and unfreeze layers while a method trains; return the largest difference from the reference."""
    rank, world_size = world()
    model = build(width)
    engine, *_ = zt.initialize(model=model, config=settings(stage, **zero))
    for step in range(2 * len(PHASES)):
        set_trained(model, PHASES[step // 2])
        engine.backward(model.loss(batch(model, step, rank)))
        engine.step()
    got, expected = weights_of(model), reference(width, world_size)
    engine.close()
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


def all_phased() -> dict[str, float]:
    found = {}
    for width in (8, 40):
        for stage in (0, 1, 2, 3):
            found[f"{width}, stage {stage}"] = phased(width, stage)
        found[f"{width}, without overlap"] = phased(width, 1, overlap_comm=False)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_frozen_before_training_by_a_method_stays(world_size: int) -> None:
    for found in run_ranks(world_size, all_phased):
        assert {name: gap for name, gap in found.items() if not gap < 2e-5} == {}


def replace_head(model: Three) -> None:
    model.c = nn.Linear(model.width, model.width)


def add_layer(model: Three) -> None:
    model.d = nn.Linear(model.width, model.width)


def move(model: Three) -> None:
    model.a.weight.data = model.a.weight.detach().clone()


CHANGES = {"c.weight": replace_head, "d.weight": add_layer, "a.weight": move}


REASONS = {
    replace_head: "were replaced or moved after initialize",
    add_layer: "['d.weight', 'd.bias'] were added to the model after initialize",
    move: "were replaced or moved after initialize",
}


def noticed(stage: int) -> list[str]:
    """Return the changes that no error named before the next update, when a method trains."""
    missed = []
    for width in (8, 40):
        for name, change in CHANGES.items():
            if stage == 3 and change is move:
                continue  # the parameter refuses
            model = build(width)
            engine, *_ = zt.initialize(model=model, config=settings(stage))
            try:
                for step in range(2):
                    engine.backward(model.loss(batch(model, step, world()[0])))
                    engine.step()
                    change(model)
                missed.append(f"{name} at width {width}")
            except LayoutError as error:
                if name not in str(error) or REASONS[change] not in str(error):
                    missed.append(f"{name} at width {width}: {error}")
            with suppress(Exception):
                engine.close()
    return missed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replaced_new_and_moved_parameters_are_named(stage: int) -> None:
    assert run_ranks(2, noticed, stage) == [[], []]
    assert stage or run_ranks(1, noticed, stage) == [[]]


def moved_before_a_save(stage: int, folder: str) -> list[str]:
    """Move a parameter after the last step, where no pass follows."""
    found = []
    for change in (move, replace_head):
        model = build(8)
        engine, *_ = zt.initialize(model=model, config=settings(stage))
        engine.backward(model.loss(batch(model, 0, world()[0])))
        engine.step()
        change(model)
        for call in (lambda: engine.save_checkpoint(folder), engine.module_state_dict):  # noqa: B023
            try:
                call()
            except LayoutError as error:
                found.append(str(error))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_saves_and_exports_name_moved_parameters(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(2, moved_before_a_save, stage, str(tmp_path)):
        assert len(found) == 4
        assert all("were replaced or moved after initialize" in text for text in found)


class Counting(EngineObserver):
    def __init__(self) -> None:
        self.passes = 0

    def training_pass(self) -> None:
        self.passes += 1


def evaluate(engine: Engine, model: TinyGPT, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    """Evaluate in every way: no gradients, inference mode, evaluation mode with gradients, single modules."""
    with torch.no_grad():
        engine(tokens, targets)
        model.head(model.norm(model.blocks[1](model.embed(tokens))))
    with torch.inference_mode():
        model.norm(model.embed(tokens))
    engine.eval()
    engine(tokens, targets)
    model.head(model.norm(model.embed(tokens)))
    engine.train()


def traces(stage: int, evaluates: bool) -> dict[str, Any]:
    """Train two steps of two micro-batches and return what can be observed of them."""
    torch.manual_seed(4)
    model = TinyGPT(layers=2)
    observer = Counting()
    made = settings(stage) | {"gradient_accumulation_steps": 2}
    engine, *_ = zt.initialize(model=model, config=made)
    engine.observer = observer
    events = watch_collectives(engine)
    sent: list[list[tuple[str, str]]] = []
    windows = []
    for index, (tokens, targets) in enumerate(token_batches(4, size=2)):
        mine = tokens.chunk(2)[world()[0]], targets.chunk(2)[world()[0]]
        if evaluates:
            evaluate(engine, model, *mine)
        events.clear()
        loss = engine(*mine)
        windows.append({name: each.expected_windows for name, each in engine.core.boundaries.items()})
        engine.backward(loss)
        if index:
            sent.append([event for event in events if not event[0].endswith("done")])
        if evaluates:
            evaluate(engine, model, *mine)
        engine.step()
    core = engine.core
    found = {
        "collectives": sent,
        "order": [boundary.name for boundary in core.passes.trained.recorded()],
        "windows": windows,
        "passes": observer.passes,
        "weights": {name: value.double().sum().item() for name, value in weights_of(model).items()},
    }
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_within_an_accumulation_leaves_no_trace(stage: int) -> None:
    assert run_ranks(2, traces, stage, True)[0] == run_ranks(2, traces, stage, False)[0]


def hook_calls(stage: int) -> tuple[Counter[str], list[str], list[str]]:
    """Count calls of the engine's forward hooks in a step by module.

    Also returns modules with units, and others that have hooks.
    """
    calls: Counter[str] = Counter()
    before, after = BoundaryHooks._before, BoundaryHooks._after

    def counted_before(self: BoundaryHooks, *args: Any) -> Any:
        calls[self._boundary.name] += 1
        return before(self, *args)

    def counted_after(self: BoundaryHooks, *args: Any) -> Any:
        calls[self._boundary.name] += 1
        return after(self, *args)

    for name, counted in (("_before", counted_before), ("_after", counted_after)):
        setattr(BoundaryHooks, name, counted)
    torch.manual_seed(4)
    model = TinyGPT(layers=2)
    engine, *_ = zt.initialize(model=model, config=config(stage))
    engine.backward(engine(*token_batches(1, size=1)[0]))
    engine.step()
    modules = sorted(engine.core.boundaries)
    others = [
        name
        for name, module in model.named_modules()
        if name not in modules and (module._forward_hooks or module._forward_pre_hooks)
    ]
    return calls, modules, others


def test_only_modules_with_units_have_hooks() -> None:
    """Each call of such a module calls two hooks, and a call of any other module none."""
    calls, modules, others = run_ranks(2, hook_calls, 3)[0]
    assert modules == ["", "blocks.0", "blocks.1", "embed", "head"]
    assert calls == dict.fromkeys(modules, 2)
    assert others == []


def look_at_weights() -> list[str]:
    """Look at weights on one rank alone at all times of a step; return the looks that were not refused."""
    model = build(40)
    engine, *_ = zt.initialize(model=model, config=settings(3))
    missed = []

    def look(when: str) -> None:
        weight = model.a.weight
        looks: dict[str, Any] = {
            "norm": lambda: weight.norm(),
            "item": lambda: weight.sum().item(),
            "detach": lambda: weight.detach().sum(),
            "data": lambda: weight.data,
            "state_dict": lambda: model.state_dict()["a.weight"].sum(),
            "copy": lambda: weight.clone(),
        }
        for name, take in looks.items():
            try:
                with torch.no_grad():
                    take()
                missed.append(f"{name} {when}")
            except zt.ParameterSharded:
                pass

    look("before training")
    for step in range(2):
        with torch.no_grad():
            model.loss(batch(model, 7, world()[0]))
        look("after an evaluation by a method")
        loss = model.loss(batch(model, step, world()[0]))
        look("before backward")
        with pytest.raises(zt.ParameterSharded):
            model.a.weight.detach().sum()
        engine.backward(loss)
        look("after backward")
        engine.step()
        look("after the step")
    with torch.no_grad():
        engine(batch(model, 8, 0))
    look("after an evaluation")
    return missed


def test_looks_from_a_script_are_refused() -> None:
    assert run_ranks(2, look_at_weights) == [[], []]


def graphs_of_blocks() -> list[int]:
    """Count graphs of a compiled block in a plain model, in an engine, and entered by itself."""
    counts = []
    for entry in ("plain", "the model", "a block"):
        graphs = 0

        def count(graph: Any, _: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        torch._dynamo.reset()
        torch.manual_seed(4)
        model = TinyGPT(layers=1)
        model.blocks[0].compile(backend=count)
        tokens, targets = token_batches(1, size=1)[0]
        if entry == "plain":
            model(tokens, targets)
        else:
            engine, *_ = zt.initialize(model=model, config=config(3))
            if entry == "the model":
                engine(tokens, targets)
            else:
                model.blocks[0](model.embed(tokens))
        counts.append(graphs)
    return counts


def test_compiled_blocks_stay_one_graph() -> None:
    assert run_ranks(2, graphs_of_blocks) == [[1, 1, 1]] * 2
