"""Scripts that use gradients between backward and step, on a model of three equal units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.training import world
from zerotrain.runtime.engine import Engine

WIDTH = 65
UNITS = ["blocks.0", "blocks.1", "blocks.2"]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(next(self.parameters()).dtype)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.float().square().mean()


def inputs(step: int) -> torch.Tensor:
    rank, _ = world()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def started(**more: Any) -> Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.01,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        **more,
    }
    engine, *_ = zt.initialize(model=Blocks(), config=config, unit_modules=UNITS)
    return engine


def backward(engine: Engine, step: int) -> None:
    engine.backward(engine(inputs(step)))


def blocks_of(engine: Engine) -> Any:
    return engine.module.blocks


def plain(engine: Engine) -> Iterator[Any]:
    for step in range(3):
        backward(engine, step)
        yield engine.step().grad_norm


def twice(engine: Engine) -> Iterator[Any]:
    """Run a second backward pass before the step: it comes after the first one's reduction."""
    for step in range(3):
        backward(engine, step)
        backward(engine, step + 10)
        yield engine.step().grad_norm


def put_off(engine: Engine) -> Iterator[Any]:
    """Put the boundary off, by the engine's call and by `no_sync`."""
    for step in range(3):
        engine.set_gradient_accumulation_boundary(False)
        backward(engine, step)
        if step == 1:
            yield zt.get_full_grad(blocks_of(engine)[0].weight)
        engine.set_gradient_accumulation_boundary(True)
        with engine.no_sync():
            backward(engine, step + 10)
        backward(engine, step + 20)
        yield engine.step().grad_norm
    engine.set_gradient_accumulation_boundary(None)


def access(engine: Engine) -> Iterator[Any]:
    first, second = blocks_of(engine)[0].weight, blocks_of(engine)[1].bias
    for step in range(3):
        backward(engine, step)
        yield zt.get_full_grad(first)
        yield zt.get_local_grad(second)
        zt.set_full_grad(second, torch.full_like(zt.get_full_grad(second), 0.25))
        zt.set_local_grad(first, zt.get_local_grad(first) * 0.5)
        yield zt.get_full_grad(second)
        yield engine.step().grad_norm


def of_others(engine: Engine) -> Iterator[Any]:
    """Change `p.grad` between backward and step, as scripts do."""
    for step in range(3):
        backward(engine, step)
        blocks_of(engine)[0].weight.grad.mul_(0.5)
        blocks_of(engine)[1].weight.grad.zero_()
        blocks_of(engine)[2].bias.grad = None
        yield float(nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01))
        nn.utils.clip_grad_value_(engine.module.parameters(), 1e-3)
        yield engine.step().grad_norm


def dropped(engine: Engine) -> Iterator[Any]:
    for step in range(3):
        backward(engine, step)
        engine.zero_grad()
        backward(engine, step + 10)
        yield engine.step().grad_norm


def frozen(engine: Engine) -> Iterator[Any]:
    """Freeze and unfreeze between steps and between passes of one."""
    block = blocks_of(engine)[1]
    for step, trains in enumerate((True, False, True)):
        block.requires_grad_(trains)
        backward(engine, step)
        yield engine.step().grad_norm
    backward(engine, 3)
    block.requires_grad_(False)
    backward(engine, 4)
    yield engine.step().grad_norm


def accumulating(engine: Engine) -> Iterator[Any]:
    _, ranks = world()
    engine.set_train_batch_size(8 * ranks)
    for step in range(4):
        backward(engine, step)
        yield engine.step().grad_norm


Script = Callable[[Engine], Iterator[Any]]


def idle(engine: Engine) -> Iterator[Any]:
    """Take a step without a backward pass after one with."""
    for step in range(2):
        backward(engine, step)
        yield engine.step().grad_norm
        yield engine.step().grad_norm


SCRIPTS: tuple[Script, ...] = (plain, twice, put_off, access, of_others, dropped, frozen, idle, accumulating)


def seen_by(script: Script, engine: Engine) -> list[Any]:
    """Return what the script sees, and the weights after it."""
    seen = [each.tolist() if isinstance(each, torch.Tensor) else each for each in script(engine)]
    engine.synchronize()
    with zt.full_parameters(engine.module):
        return seen + [parameter.tolist() for parameter in engine.module.parameters()]
