"""Layers compute in FP8 without a change that a script sees, and what cannot do so is said."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.fp8 import product
from zerotrain.runtime.fp8.layers import Fp8Layers
from zerotrain.runtime.fp8.product import Operand, Scheme
from zerotrain.runtime.metrics.worker import RankIdentity, WorkerMetrics
from zerotrain.runtime.train.measuring import measure

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(16, 30)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.head(self.body(x)).float() ** 2).mean() + self.odd(x).float().mean()
        return loss


def start(model: nn.Module, stage: int = 0, **fp8: Any) -> Engine:
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "fp8": {"enabled": True, **fp8},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW"},
    }
    return zt.initialize(model=model, config=config)[0]


def narrow(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(("recipe", "kind"), [("rowwise", RuntimeError), ("tensorwise", ValueError)])
def test_a_product_that_a_gpu_refuses_is_named_before_the_first_step(
    recipe: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blackwell's smaller GPUs have FP8, but torch's library none with scales by rows."""

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise kind("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(product, "scaled_product", refused)
    with pytest.raises(ConfigError, match=rf"fp8\.recipe.*NOT_SUPPORTED.*{recipe}") as raised:
        start(Net(), recipe=recipe)
    assert "more" not in str(raised.value)
    monkeypatch.setattr(product, "scaled_product", lambda a, *_, **__: a.bfloat16() * 2)
    with pytest.raises(ConfigError, match=r"fp8\.recipe.*wrong products"):
        start(Net(), recipe=recipe)


def test_classes_names_and_hooks_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = Net(), list[Any]()
    names = list(model.state_dict())
    model.body[0].register_forward_hook(lambda *call: seen.append(call))
    with caplog.at_level(logging.WARNING, "zerotrain"):
        engine = start(model)
    assert narrow(model) == ["body.0", "body.2"]
    assert "1 of 3 linear layers stay in bf16, as 16 does not divide their sizes: odd" in caplog.text
    assert {type(model.body[0]), type(model.odd)} == {nn.Linear}
    x = torch.randn(4, 16).bfloat16()
    engine.backward(engine(x))
    engine.step()
    assert len(seen) == 1
    assert list(model.state_dict()) == names
    assert engine.core.fp8 is not None
    ranges = engine.core.fp8.ranges()
    assert ranges[Operand.INPUT].amax >= float(x.abs().max())
    assert all(found.amax > 0.0 and found.overflow_ratio == 0.0 for found in ranges.values())
    engine.close()
    assert narrow(model) == []


def test_a_copy_of_a_layer_uses_its_own_weight() -> None:
    layer = nn.Linear(16, 16, bias=False).bfloat16()
    layers = Fp8Layers([layer], Scheme(by_row=True, weight_gradient=False), torch.device("cpu"))
    twin, x = copy.deepcopy(layer), torch.randn(4, 16).bfloat16()
    expected = twin(x)
    with torch.no_grad():
        layer.weight.zero_()
    assert expected.any()
    assert twin(x).equal(expected)
    layers.remove()
    assert narrow(layer) == []


def test_the_exporter_shows_the_magnitudes() -> None:
    model, metrics = Net(), WorkerMetrics(RankIdentity(job="gpt", rank=0, attempt=1))
    engine = start(model)
    engine.backward(engine(torch.full((4, 16), 3.0).bfloat16()))
    measure(metrics, engine)
    labels = {"job_name": "gpt", "rank": "0", "operand": "input"}
    assert (metrics.registry.get_sample_value("zerotrain_fp8_amax", labels) or 0.0) >= 3.0
    assert metrics.registry.get_sample_value("zerotrain_fp8_overflow_ratio", labels) == 0.0
    engine.close()


def test_the_share_of_layers_with_an_overflow_is_counted() -> None:
    model = Net()
    engine = start(model)
    x = torch.randn(4, 16).bfloat16()
    x[0, 0] = torch.inf
    engine(x)
    assert engine.core.fp8 is not None
    assert engine.core.fp8.ranges()[Operand.INPUT].overflow_ratio == 1.0
    assert engine.core.fp8.ranges()[Operand.WEIGHT].overflow_ratio == 0.0
    engine.close()


def test_layers_are_excluded_by_the_last_parts_of_names_or_patterns() -> None:
    model = Net()
    engine = start(model, exclude=["body.0", "o*"])
    assert narrow(model) == ["body.2", "head"]
    engine.close()


def called_by_itself(stage: int) -> tuple[bool, bool]:
    """Return whether a layer outside of forward has the FP8 result, and whether it has that of bf16."""
    torch.manual_seed(3)
    model = Net()
    layer: Any = model.body[0]
    engine = start(model, stage)
    x = torch.randn(4, 16).bfloat16()
    with torch.no_grad(), zt.full_parameters(model):
        expected = layer(x)
        plain = nn.functional.linear(x, layer.weight, layer.bias)
    loss = engine(x)
    found = layer(x)  # its values are whole on demand between forward and backward
    engine.backward(loss)
    engine.close()
    return found.equal(expected), found.equal(plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_called_by_itself_computes_in_fp8(stage: int) -> None:
    assert run_ranks(2, called_by_itself, stage) == [(True, False)] * 2


def test_a_model_without_a_fitting_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp8\.enabled: needs a torch\.nn\.Linear .* the model has none"):
        start(nn.Sequential(nn.Linear(10, 10)))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerotrain.runtime.matmul_support import fp8_refusal

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    for found, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=found: found)
        reason = fp8_refusal(torch.device("cuda", 0))
        assert (reason is not None) == is_refused
        if reason is not None:
            assert "compute capability 8.9 or newer" in reason
            assert "NVIDIA A100 has 8.0" in reason
    assert fp8_refusal(torch.device("cpu")) is None
