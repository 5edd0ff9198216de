"""Arguments of any outermost call of a bf16 or fp16 model are cast by `auto_cast`, and dtype errors explain
them: of the model, of a module of it, of a method that calls its modules, and of `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks

WIDTH = 40


class Codec(nn.Module):
    """A model that is also used in parts."""

    def __init__(self, *, with_buffer: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.register_buffer("scale", torch.ones(WIDTH))
        self.with_buffer = with_buffer
        self.seen: list[torch.dtype] = []
        if with_buffer:
            self.first.forward = self.scaled  # type: ignore[method-assign]

    def scaled(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input * self.first.scale, self.first.weight)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))

    def encode(self, features: torch.Tensor) -> Any:
        return self.first(features)

    def generate(self, features: torch.Tensor, steps: int = 1) -> Any:
        """Use a weight before any module, as a generation loop may."""
        with torch.no_grad():
            self.seen.append(features.dtype)
            return self(nn.functional.linear(features, self.second.weight))


ENTRIES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "engine": (lambda engine, x: engine(x), "Codec.forward got float32 in x while"),
    "model": (lambda engine, x: engine.module(x), "Codec.forward got float32 in x while"),
    "module": (lambda engine, x: engine.module.first(x), "Linear.forward got float32 in input while"),
    "second module": (lambda engine, x: engine.module.second(x), "Linear.forward got float32 in input while"),
    "method": (lambda engine, x: engine.encode(x), "Linear.forward got float32 in input while"),
    "generate": (lambda engine, x: engine.generate(x), "Codec.generate got float32 in features while"),
    "by name": (
        lambda engine, x: engine.module.generate(features=x, steps=2),
        "Codec.generate got float32 in features while",
    ),
}


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        dtype: {"enabled": True, **more},
    }


def texts(stage: int, dtype: str, with_buffer: bool) -> dict[str, str]:
    """Return the errors of every entry with an argument that does not fit, and train on afterwards."""
    low = torch.bfloat16 if dtype == "bf16" else torch.float16
    engine: Any = zt.initialize(model=Codec(with_buffer=with_buffer), config=config(stage, dtype))[0]
    x = torch.ones(2, WIDTH, dtype=low if with_buffer else torch.float32)
    found = {}
    for name, (call, _) in ENTRIES.items():
        try:
            call(engine, x)
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    if not with_buffer:
        engine.backward(engine.module.second(engine.encode(x.to(low))).float().square().mean())
        engine.step()
        engine.backward(engine(x.to(low)).float().square().mean())
        engine.step()
    engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_names_the_arguments_of_the_outermost_call(stage: int, dtype: str) -> None:
    for found in run_ranks(2, texts, stage, dtype, False):
        assert list(found) == list(ENTRIES)
        for name, (_, text) in ENTRIES.items():
            assert text in found[name], name
            assert f"{dtype}.auto_cast" in found[name]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_of_any_outermost_call_names_kept_buffers(stage: int) -> None:
    for found in run_ranks(2, texts, stage, "bf16", True):
        assert set(found) == set(ENTRIES) - {"second module"}
        for name, text in found.items():
            assert "'first.scale' (float32)" in text, name
            assert "data_types.buffer_dtype" in text


def cast(stage: int) -> list[torch.dtype]:
    """Return the dtypes of every entry's result and of the arguments of `generate`."""
    engine: Any = zt.initialize(model=Codec(), config=config(stage, "bf16", auto_cast=True))[0]
    x = torch.ones(2, WIDTH)
    results = [call(engine, x).dtype for call, _ in ENTRIES.values()]
    module = engine.module
    engine.close()
    assert "generate" not in vars(module)
    return [*results, *module.seen]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_auto_cast_casts_the_arguments_of_every_outermost_call(stage: int) -> None:
    for dtypes in run_ranks(2, cast, stage):
        assert set(dtypes) == {torch.bfloat16}
        assert len(dtypes) == len(ENTRIES) + 2


def hooks_within() -> list[int]:
    """Return the number of forward hooks of a module before it was an entry and in the model afterwards."""
    engine: Any = zt.initialize(model=Codec(), config=config(3, "bf16"))[0]
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    counts = [len(engine.module.first._forward_hooks)]
    engine.encode(x)
    engine(x)
    counts.append(len(engine.module.first._forward_hooks))
    engine.close()
    return counts


@pytest.mark.ranks
def test_a_module_within_the_model_pays_nothing_for_it() -> None:
    for before, after in run_ranks(2, hooks_within):
        assert before == after


class Encoder(nn.Module):
    """A module around layers too small for units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(4, 8, 3, padding=1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, audio: torch.Tensor) -> Any:
        hidden = self.mix(audio).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.head = Encoder(), nn.LayerNorm(8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 8))])

    def forward(self, audio: torch.Tensor) -> Any:
        hidden = self.encoder(audio)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


SMALL: dict[str, tuple[int, ...]] = {
    "encoder": (2, 4, 6),
    "encoder.mix": (2, 4, 6),
    "encoder.layers.1": (2, 8),
    "encoder.layers.1.0": (2, 8),
    "norm": (2, 8),
    "head": (2, 8),
    "blocks.0": (2, 8),
}
"""Modules that are entered directly, and a shape that they take; only the last is a unit."""


def enter_small(stage: int, casts: bool) -> tuple[dict[str, str], list[str]]:
    """Enter each module twice, and train; return errors or dtypes, and the modules with a hook that are no
    units."""
    settings = config(stage, "bf16", **({"auto_cast": True} if casts else {}))
    engine: Any = zt.initialize(model=Speech(), config=settings)[0]
    found = {}
    for name, shape in [*SMALL.items(), *SMALL.items()]:
        try:
            found[name] = str(engine.module.get_submodule(name)(torch.ones(shape)).dtype)
        except RuntimeError as raised:
            found[name] = str(raised)
    hooked = [name for name, each in engine.module.named_modules() if each._forward_pre_hooks and name]
    audio = torch.ones(2, 4, 6)
    engine.backward(engine(audio if casts else audio.bfloat16()).float().square().mean())
    engine.step()
    engine.close()
    assert not any(each._forward_pre_hooks for each in engine.module.modules())
    return found, [name for name in hooked if name != "blocks.0"]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_outside_the_units_is_an_entry(stage: int, world_size: int) -> None:
    without_hooks = {"encoder.layers.1.1", "blocks.0.0", "blocks.0.1"}
    for found, hooked in run_ranks(world_size, enter_small, stage, False):
        for name, text in found.items():
            assert "bf16.auto_cast" in text, name
            assert "forward got float32 in" in text, name
        assert not without_hooks & set(hooked)
        assert set(SMALL) - {"blocks.0"} <= set(hooked)
    for found, _ in run_ranks(world_size, enter_small, stage, True):
        assert set(found.values()) == {"torch.bfloat16"}


class EncoderAndNorm(nn.Module):
    """An encoder around units, beside a layer that computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.norm = Float32Norm()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.encoder(x)
        return checkpoint(self.norm, hidden.float(), use_reentrant=False)


class Float32Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen.append(input.dtype)
        weight, bias = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def encoder_engine(stage: int, *, casts: bool = True) -> Any:
    torch.manual_seed(0)
    settings = config(stage, "bf16", **({"auto_cast": True} if casts else {}))
    units = ["encoder.0", "encoder.1"]
    return zt.initialize(model=EncoderAndNorm(), config=settings, unit_modules=units)[0]


def enter_one_by_one(stage: int, casts: bool) -> list[str]:
    """Enter a module around units, one beside it and a unit, twice."""
    engine, found = encoder_engine(stage, casts=casts), []
    for module in 2 * [engine.module.encoder, engine.module.norm, engine.module.encoder[1]]:
        try:
            found.append(str(module(torch.ones(2, WIDTH)).dtype))
        except RuntimeError as raised:
            found.append(str(raised).split(" while")[0][-40:])
    engine.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_entering_a_module_around_units_leaves_later_entries_as_they_are(stage: int) -> None:
    assert run_ranks(1, enter_one_by_one, stage, True) == [["torch.bfloat16"] * 6]
    (found,) = run_ranks(1, enter_one_by_one, stage, False)
    assert found[:3] == found[3:]
    assert "Sequential.forward got float32 in input" in found[0]
    assert "Linear.forward got float32 in input" in found[2]


def recompute(stage: int) -> list[str]:
    engine = encoder_engine(stage)
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    seen: list[torch.dtype] = engine.module.norm.seen
    engine.close()
    return [str(dtype) for dtype in seen]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_what_checkpointing_recomputes_is_no_entry(stage: int) -> None:
    assert run_ranks(1, recompute, stage) == [["torch.float32", "torch.float32"]]
