"""Random states of a model that is divided over ranks, drawn again by a recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zerotrain.runtime.activation.settings import Settings, _Process, adopt
from zerotrain.runtime.comm.model_parallel import ModelParallel
from zerotrain.runtime.deepspeed import checkpointing

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def fresh_process() -> Any:
    yield
    adopt(Settings())
    _Process.is_configured = False
    checkpointing.get_cuda_rng_tracker().reset()


class Part(nn.Module):
    """A divided layer: its dropout draws from the model-parallel state, what follows from the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            x = nn.functional.dropout(self.linear(x).tanh(), 0.5)
        return nn.functional.dropout(x, 0.5).sin()


def gradients(*, recomputes: bool, host: bool = False) -> list[torch.Tensor]:
    checkpointing.configure(None, checkpoint_in_cpu=host)
    checkpointing.model_parallel_cuda_manual_seed(3)
    parts = [Part(), Part()]
    for part in parts:
        nn.init.ones_(part.linear.weight)
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    for part in parts:
        x = checkpointing.checkpoint(part, x) if recomputes else part(x)
    x.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    # A second recomputation draws the same again.
    x.sum().backward()  # type: ignore[no-untyped-call]
    after = torch.rand(4)
    return [
        *(weight.grad for part in parts for weight in part.parameters() if weight.grad is not None),
        after,
    ]


@pytest.mark.parametrize("host", [False, True])
def test_a_recomputation_draws_the_same(host: bool) -> None:
    plain = gradients(recomputes=False)
    again = gradients(recomputes=True, host=host)
    assert len(plain) == len(again) == 5
    assert all(map(torch.equal, plain, again))


def test_ranks_of_a_group_draw_differently_only_within() -> None:
    drawn = []
    for rank in (0, 1):
        adopt(Settings(parallel=ModelParallel(group=None, rank=rank, world_size=2)))
        checkpointing.model_parallel_cuda_manual_seed(3)
        with checkpointing.get_cuda_rng_tracker().fork():
            inside = torch.rand(4)
        drawn.append((inside, torch.rand(4)))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_states_are_kept_and_put_back() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("mine", 5)
    states = tracker.get_states()
    draws = []
    for _ in range(2):
        tracker.set_states(states)
        with tracker.fork("mine"):
            draws.append(torch.rand(4))
    assert torch.equal(*draws)


def test_misuse_is_named() -> None:
    _Process.is_configured = False
    with pytest.raises(RuntimeError, match=r"checkpointing\.configure\(mpu\)"):
        checkpointing.model_parallel_cuda_manual_seed(3)
    tracker = checkpointing.get_cuda_rng_tracker()
    with (
        pytest.raises(ValueError, match="'model-parallel-rng' is not added; call model_parallel_cuda"),
        tracker.fork(),
    ):
        pass
    tracker.add("mine", 5)
    for name, seed in (("mine", 6), ("other", 5)):
        with pytest.raises(ValueError, match=r"is added already.*reset\(\)"):
            tracker.add(name, seed)
