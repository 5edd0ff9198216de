"""An `mpu` object supplies the groups of a model divided over two ranks, with two data-parallel replicas.

Weights, norm, clipping and overflow are those of the whole model in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.subgroup import SubGroup

pytestmark = pytest.mark.ranks


WIDTH, HIDDEN, STEPS, CLIP = 8, 12, 3, 0.05


class Mpu:
    """An `mpu` in which ranks 2k and 2k + 1 hold the parts of one replica."""

    def __init__(self) -> None:
        world_size = dist.get_world_size()
        models = [dist.new_group([rank, rank + 1]) for rank in range(0, world_size, 2)]
        data = [dist.new_group(list(range(part, world_size, 2))) for part in range(2)]
        self.part, self.replica = dist.get_rank() % 2, dist.get_rank() // 2
        self._model, self._data = models[self.replica], data[self.part]

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return self.part

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> Any:
        return self._data


class Enter(torch.autograd.Function):
    """Identity whose gradient is the sum of the parts' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Leave(torch.autograd.Function):
    """Sum of the parts' results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


enter: Callable[..., torch.Tensor] = Enter.apply
leave: Callable[..., torch.Tensor] = Leave.apply


class Block(nn.Module):
    """A replicated norm and bias; `up` and `down` hold all of the hidden units, or one part of them."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        if self.group is not None:
            hidden = enter(hidden, self.group)
        mixed: torch.Tensor = self.down(torch.tanh(self.up(hidden)))
        if self.group is not None:
            mixed = leave(mixed, self.group)
        return x + mixed + self.bias

    def keep_part(self, part: int, group: Any) -> None:
        """Keep one of two parts, marked as Megatron marks them."""
        self.group, half = group, HIDDEN // 2
        own = slice(part * half, (part + 1) * half)
        self.up.weight = nn.Parameter(self.up.weight.detach()[own].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach()[:, own].clone())
        for weight in (self.up.weight, self.down.weight):
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]


class Model(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = zt.checkpoint_activations(block, x) if self.recompute else block(x)
        return x.square().mean()


def batch(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(4, WIDTH, generator=generator)


def reference(num_replicas: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return norms, and the whole model's weights."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            (model(batch(step, replica)) / num_replicas).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def own_part(name: str, whole: torch.Tensor, part: int) -> torch.Tensor:
    dim = {"up.weight": 0, "down.weight": 1}.get(name.split(".", 2)[2])
    return whole if dim is None else whole.chunk(2, dim)[part]


def train(stages: tuple[int, ...]) -> None:
    mpu = Mpu()
    num_replicas = dist.get_world_size() // 2
    norms, weights = reference(num_replicas)
    for stage in stages:
        model = Model(recompute=stage == 3)
        for block in model.blocks:
            block.keep_part(mpu.part, mpu.get_model_parallel_group())  # type: ignore[operator]
        settings = config(
            stage,
            gradient_clipping=CLIP,
            tensor_parallel={"tp_size": 2},
            activation_checkpointing={"partition_activations": stage == 3},
        )
        engine, *_ = zt.initialize(model=model, config=settings, mpu=mpu)
        assert (engine.world_size, engine.rank) == (num_replicas, mpu.replica)
        for step in range(STEPS):
            engine.backward(engine(batch(step, mpu.replica)))
            by_torch = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            assert float(by_torch) == pytest.approx(norms[step], rel=1e-5)
            assert engine.step().grad_norm == pytest.approx(norms[step], rel=1e-5)
        for name, value in model.named_parameters():
            expected = own_part(name, weights[name], mpu.part)
            assert np.allclose(zt.get_full_fp32(value), expected, rtol=0, atol=1e-5), (stage, name)
        check_common_decision(engine, mpu)
        with pytest.raises(RuntimeError, match="divided over a model-parallel group"):
            engine.save_checkpoint("unused")
        engine.close()


def check_common_decision(engine: zt.Engine, mpu: Mpu) -> None:
    """An overflow in one part is skipped by both; a stop that one rank requests is agreed by all."""
    engine.backward(engine(batch(0, mpu.replica)))
    weight = engine.module.get_parameter("blocks.0.up.weight")
    if mpu.part == 1:
        zt.set_full_grad(weight, torch.full(weight.shape, float("inf")))
    if dist.get_rank() == 0:
        engine.request_stop()
    assert engine.step().skipped
    assert engine.stop_agreed


@pytest.mark.parametrize(("world_size", "stages"), [(4, (1, 3)), (2, (0,))])
def test_a_divided_model_trains_as_the_whole_one(world_size: int, stages: tuple[int, ...]) -> None:
    run_ranks(world_size, train, stages)


def make_sub_groups() -> None:
    """Make the subgroups twice, as for two engines in a row.

    A second group of the same name could find the first one's addresses.
    """
    mpu = Mpu()
    names = []
    for _ in range(2):
        comm = Comm(device=torch.device("cpu"), group=mpu.get_data_parallel_group())
        group = SubGroup(comm, [range(comm.world_size)])
        full = torch.empty(comm.world_size)
        group.all_gather(full, torch.tensor([float(comm.rank)]), label="ranks").wait()
        assert full.tolist() == [0.0, 1.0]
        names.append(group._group.group_name)
        group.close()
        comm.close()
        assert names[-1] in dist.distributed_c10d._world.pg_names.values(), "the name is free for another"
    assert names[0] == names[1]


def test_groups_of_a_part_of_the_ranks_outlive_their_engine() -> None:
    run_ranks(4, make_sub_groups)


class Pipeline(Mpu):
    def get_pipe_parallel_world_size(self) -> int:
        return 2


def refused() -> None:
    with pytest.raises(ValueError, match=r"mpu.get_pipe_parallel_world_size\(\) must be 1"):
        zt.initialize(model=nn.Linear(2, 2), config=config(0), mpu=Pipeline())
    with pytest.raises(TypeError, match=r"mpu must have a method get_model_parallel_group\(\)"):
        zt.initialize(model=nn.Linear(2, 2), config=config(0), mpu=object())
    dist.barrier()  # a rank that ends early would break the other one's groups while they connect


def test_what_an_mpu_must_be() -> None:
    run_ranks(2, refused)
