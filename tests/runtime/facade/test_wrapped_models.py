"""Models that torch's own data parallelism already wraps are refused by name, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from zerotrain.runtime.zero.layout import LayoutError

pytestmark = pytest.mark.ranks


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=mesh())
    return module


def replicated(module: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    replicate(module)
    return module


def tensor_parallel(module: nn.Module) -> nn.Module:
    from torch.distributed.tensor import distribute_tensor

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh()))
    return module


KINDS: dict[str, tuple[Callable[[nn.Module], nn.Module], str, str]] = {
    "DDP": (ddp, "is wrapped by DistributedDataParallel", "module"),
    "DataParallel": (nn.DataParallel, "is wrapped by DataParallel", "module"),
    "FSDP1": (fsdp1, "is wrapped by FullyShardedDataParallel (FSDP1)", "build the model without it"),
    "FSDP2": (fsdp2, "is wrapped by fully_shard() (FSDP2)", "build the model without it"),
    "replicate": (replicated, "is wrapped by replicate()", "build the model without it"),
    "DTensor": (tensor_parallel, "weight' is a DTensor", "initialize(mpu=...)"),
}


def refusals() -> dict[str, str]:
    """The error for every kind of model, by kind and place."""
    found = {}
    for kind, (wrap, *_) in KINDS.items():
        for place in ("whole", "inside", "compiled"):
            inner = wrap(small())
            model = {"whole": inner, "inside": nn.Sequential(nn.Linear(8, 8), inner)}.get(place)
            for stage in (0, 3):
                try:
                    wanted: Any = torch.compile(inner, backend="eager") if model is None else model
                    engine, *_ = zt.initialize(model=wanted, config=config(stage))
                    found[f"{kind} {place} {stage}"] = "accepted"
                    engine.close()
                except LayoutError as error:
                    found[f"{kind} {place} {stage}"] = str(error)
    return found


def test_every_kind_is_refused_by_name_wherever_it_is() -> None:
    texts = run_ranks(2, refusals)[0]
    assert len(texts) == 6 * len(KINDS)
    for case, text in texts.items():
        kind, place, _ = case.split()
        _, expected, way_out = KINDS[kind]
        assert expected in text, case
        assert way_out in text, case
        if kind != "DTensor":
            assert text.startswith("module '1' of the model" if place == "inside" else "the model "), text


class Own(nn.Module):
    """A module whose own attribute is named like DataParallel's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result


@pytest.mark.parametrize("stage", [0, 3])
def test_an_own_attribute_called_module_keeps_its_name(stage: int) -> None:
    engine, *_ = zt.initialize(model=Own(), config=config(stage))
    assert set(engine.module_state_dict()) == {"module.weight", "module.bias"}
    engine.close()


def test_what_ddp_wrapped_trains_bare() -> None:
    assert run_ranks(2, train_bare)[0]


def train_bare() -> bool:
    wrapped: Any = ddp(small())
    engine, *_ = zt.initialize(model=wrapped.module, config=config(2))
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    engine.close()
    return True
