"""The engine can be read like the module that DeepSpeed's engine is, under the plain model's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zerotrain.runtime as zt
from tests.support.free_form import config
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.unit


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))


def wrapped() -> nn.Module:
    model: Any = plain()
    model[2] = checkpoint_wrapper(model[2])
    built: nn.Module = model
    return built


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(plain(), backend="eager")  # type: ignore[assignment]
    return model


def engine_of(model: nn.Module, stage: int = 0) -> Engine:
    engine, *_ = zt.initialize(model=model, config=config(stage))
    return engine


@pytest.mark.parametrize("make", [plain, wrapped, compiled])
def test_names_are_those_of_the_plain_model(make: Callable[[], nn.Module]) -> None:
    engine, model = engine_of(make()), plain()
    for method in ("named_parameters", "named_buffers"):
        expected = {name: value.shape for name, value in getattr(model, method)()}
        assert {name: value.shape for name, value in getattr(engine, method)()} == expected
    assert {name: value.shape for name, value in engine.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert [name for name, _ in model.named_modules() if name not in dict(engine.named_modules())] == []
    assert not any("_orig_mod" in name or "_wrapped" in name for name, _ in engine.named_modules())
    assert dict(engine.named_parameters(prefix="p")).keys() == dict(model.named_parameters("p")).keys()
    engine.close()


def test_parts_are_the_models_objects() -> None:
    engine = engine_of(plain())
    model: Any = engine.module
    pairs = (
        (engine.parameters(), model.parameters()),
        (engine.buffers(), model.buffers()),
        (engine.modules(), model.modules()),
    )
    for mine, theirs in pairs:
        assert [id(part) for part in mine] == [id(part) for part in theirs] != []
    assert list(engine.children()) == [model]
    assert dict(engine.named_children()) == dict(engine._modules) == {"module": model}
    assert nn.Module not in type(engine).__mro__
    assert isinstance(engine.module, nn.Module)
    engine.close()


def test_the_mode_is_the_models() -> None:
    engine = engine_of(plain())
    assert (engine.training, engine.module.training) == (True, True)
    assert engine.eval() is engine
    assert (engine.training, engine.module[0].training) == (False, False)  # type: ignore[index]
    assert engine.train().training
    engine.close()


def test_what_accelerate_asks_for() -> None:
    """Accelerate needs it for `has_compiled_regions` and `unwrap_model`."""
    engine = engine_of(plain())
    assert not any(isinstance(part, torch._dynamo.OptimizedModule) for part in engine._modules.values())
    assert engine._modules["module"] is engine.module
    engine.close()
