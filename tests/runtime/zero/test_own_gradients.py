"""Stage 1 with one micro-batch per step keeps a rank's own part of the gradients: the bits of whole sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime import setup
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


WIDTH = 65
UNITS = ["blocks.0", "blocks.1", "blocks.2"]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(self.blocks[0].weight.dtype)
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
            yield zt.get_full_grad(engine.module.blocks[0].weight)
        engine.set_gradient_accumulation_boundary(True)
        with engine.no_sync():
            backward(engine, step + 10)
        backward(engine, step + 20)
        yield engine.step().grad_norm
    engine.set_gradient_accumulation_boundary(None)


def access(engine: Engine) -> Iterator[Any]:
    first, second = engine.module.blocks[0].weight, engine.module.blocks[1].bias
    for step in range(3):
        backward(engine, step)
        yield zt.get_full_grad(first)
        yield zt.get_local_grad(second)
        zt.set_full_grad(second, torch.full_like(zt.get_full_grad(second), 0.25))
        zt.set_local_grad(first, zt.get_local_grad(first) * 0.5)
        yield zt.get_full_grad(second)
        yield engine.step().grad_norm


def of_others(engine: Engine) -> Iterator[Any]:
    """What scripts do to `p.grad` between backward and step."""
    for step in range(3):
        backward(engine, step)
        engine.module.blocks[0].weight.grad.mul_(0.5)
        engine.module.blocks[1].weight.grad.zero_()
        engine.module.blocks[2].bias.grad = None
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
    block = engine.module.blocks[1]
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


SCRIPTS = (plain, twice, put_off, access, of_others, dropped, frozen, accumulating)
MORE: tuple[dict[str, Any], ...] = (
    {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
    # Without overlap whole sums of two passes are sent at once, in fp16, and rounded to it.
    {
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    {"bf16": {"enabled": False}},
)


def outcome(script: Callable[[Engine], Iterator[Any]], more: dict[str, Any], *, is_whole: bool) -> list[Any]:
    if is_whole:
        setup.keeps_own_gradients = lambda config: config.zero.stage > 1
    engine = started(**more)
    kept = engine.memory.live_bytes(MemoryKind.GRADS)
    seen = [each.tolist() if isinstance(each, torch.Tensor) else each for each in script(engine)]
    after = engine.memory.live_bytes(MemoryKind.GRADS)
    with zt.full_parameters(engine.module):
        seen += [parameter.tolist() for parameter in engine.module.parameters()]
    engine.close()
    return [(kept, after), seen]


def outcomes(is_whole: bool) -> list[list[Any]]:
    runs: list[tuple[Callable[[Engine], Iterator[Any]], dict[str, Any]]] = [
        *((script, {}) for script in SCRIPTS),
        *((script, more) for more in MORE for script in (plain, twice)),
    ]
    return [outcome(script, more, is_whole=is_whole) for script, more in runs]


def test_a_part_of_the_sums_gives_the_bits_of_whole_ones() -> None:
    parts, wholes = run_ranks(2, outcomes, False), run_ranks(2, outcomes, True)
    for part, whole in zip(parts, wholes, strict=True):
        for index, ((bytes_of_part, mine), (bytes_of_whole, theirs)) in enumerate(
            zip(part, whole, strict=True)
        ):
            assert repr(mine) == repr(theirs), index  # a norm may be NaN
            assert bytes_of_whole[0] == bytes_of_whole[1], index
            # Whole sums are made when a script needs them: where the boundary is put off, and accumulated.
            narrow = index < 14  # in fp32 autograd writes into the sums themselves
            assert bytes_of_part[0] == bytes_of_whole[0] // (2 if narrow else 1), index
            grows = index in (SCRIPTS.index(put_off), SCRIPTS.index(accumulating))
            assert bytes_of_part[1] == bytes_of_whole[1] // (1 if grows or not narrow else 2), index
