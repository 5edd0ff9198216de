"""Buffers beside weights of low precision.

BatchNorm trains without a switch. Other buffers keep their dtype and are named when they meet a weight; with
`data_types.buffer_dtype` all of them train.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.buffers import noise, sgd
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.zero.strided import as_bytes

WIDTH, BATCH, STEPS, LR = 16, 4, 4, 0.05
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 128.0


class Sinusoidal(nn.Module):
    """The tutorials' table of positions in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        place = torch.arange(8).unsqueeze(1) * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        self.register_buffer("table", torch.stack((place.sin(), place.cos()), dim=2).flatten(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.float().abs() * 8).long().clamp(max=31)[:, :8]
        hidden: torch.Tensor = self.head(self.norm(self.embed(tokens) + self.table))
        return hidden


class Projected(nn.Module):
    """VeRA: frozen random projections in buffers that layers share, with trained scales."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((4,), 0.1))
        self.shared = nn.Module()
        self.shared.register_buffer("down", noise(1, 4, WIDTH), persistent=False)
        self.shared.register_buffer("up", noise(2, WIDTH, 4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        low = nn.functional.linear(inputs, self.shared.get_buffer("down")) * self.scale
        hidden: torch.Tensor = self.base(inputs) + nn.functional.linear(low, self.shared.get_buffer("up"))
        return hidden


class Rotary(nn.Module):
    """Rotary embeddings as in transformers: angles in fp32, cast where they meet activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("inv_freq", 1.0 / (1e4 ** (torch.arange(0, WIDTH) / WIDTH)), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(3001.0, 3001.0 + len(inputs)).unsqueeze(1) * self.get_buffer("inv_freq").float()
        hidden: torch.Tensor = self.layer(inputs) * angles.cos().to(inputs.dtype)
        return hidden


def normalised(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))


def stacked(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Linear(8, 1))


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, 1))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    needs_switch: tuple[str, ...] = ()
    """Buffers that meet a weight; empty if the model trains without the switch."""
    is_image: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return self.build().train()

    def inputs(self, step: int, rank: int) -> torch.Tensor:
        values = noise(100 * step + rank, BATCH, WIDTH)
        return values.view(BATCH, 1, 4, 4) if self.is_image else values


def loss_of(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs).float() - 1).square().mean()


CASES = {
    "sinusoidal": Case(Sinusoidal, ("table",)),
    "spectral norm": Case(spectral, ("0.parametrizations.weight.0._u",)),
    "old spectral norm": Case(
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)),
        ("0.weight_u",),
    ),
    "projections": Case(Projected, ("shared.down", "shared.up")),
    "rotary": Case(Rotary),
    "BatchNorm1d": Case(lambda: stacked(nn.BatchNorm1d(8))),
    "BatchNorm1d without weights": Case(lambda: stacked(nn.BatchNorm1d(8, affine=False))),
    "BatchNorm1d, cumulative": Case(lambda: stacked(nn.BatchNorm1d(8, momentum=None))),
    "BatchNorm2d": Case(lambda: normalised(nn.BatchNorm2d(4)), is_image=True),
    "InstanceNorm2d": Case(
        lambda: normalised(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), is_image=True
    ),
    "InstanceNorm2d without weights": Case(
        lambda: normalised(nn.InstanceNorm2d(4, track_running_stats=True)), is_image=True
    ),
}

FOLLOWING = ("BatchNorm1d", "BatchNorm1d, cumulative", "BatchNorm2d")
"""Modules whose running statistics take the dtype of the weights."""


@dataclass
class Outcome:
    losses: list[float]
    buffers: dict[str, tuple[str, list[float]]]
    evaluated: float


def config(stage: int, precision: str, **types: Any) -> dict[str, Any]:
    settings = sgd(stage, precision, data_types=types) if types else sgd(stage, precision)
    settings["optimizer"]["params"]["lr"] = LR
    if precision == "fp16":
        settings["fp16"]["loss_scale"] = SCALE
    return settings


def buffers_of(model: nn.Module) -> dict[str, tuple[str, list[float]]]:
    return {
        name: (str(value.dtype), value.flatten().tolist())
        for name, value in model.named_buffers()
        if value.dtype.is_floating_point
    }


def trained(name: str, stage: int, precision: str, types: dict[str, Any]) -> Outcome:
    case, (rank, _) = CASES[name], world()
    model = case.model()
    engine, *_ = zt.initialize(model=model, config=config(stage, precision, **types))
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, case.inputs(step, rank).to(DTYPES[precision]))
        engine.backward(loss)
        engine.step()
        rows = engine.comm.gather_record([loss.item()])
        losses.append(sum(row[0] for row in rows) / len(rows))
    engine.eval()
    with torch.no_grad():
        evaluated = loss_of(engine, case.inputs(STEPS, rank).to(DTYPES[precision])).item()
    engine.close()
    return Outcome(losses, buffers_of(model), evaluated)


def reference(name: str, precision: str, world_size: int, casts: Callable[[str], bool]) -> Outcome:
    """Train with plain torch: low-precision copies of fp32 masters, and SGD on the masters."""
    case, dtype = CASES[name], DTYPES[precision]
    model = case.model()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    kept = {key: value.clone() for key, value in model.named_buffers()}
    model.to(dtype)
    for key, value in model.named_buffers():
        if value.dtype.is_floating_point and not casts(key):
            value.data = kept[key]
    scale = SCALE if precision == "fp16" else 1.0
    own = [[value.clone() for value in model.buffers()] for _ in range(world_size)]  # of each rank
    losses = []
    for step in range(STEPS):
        sums = [torch.zeros_like(master) for master in masters]
        total = 0.0
        for rank in range(world_size):
            model.zero_grad()
            exchange(model, own[rank])
            loss = loss_of(model, case.inputs(step, rank).to(dtype))
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / world_size
            exchange(model, own[rank])
            for into, parameter in zip(sums, model.parameters(), strict=True):
                if parameter.grad is not None:
                    into.add_(parameter.grad.float() / scale, alpha=1 / world_size)
        with torch.no_grad():
            for master, grad, parameter in zip(masters, sums, model.parameters(), strict=True):
                master.sub_(grad, alpha=LR)
                parameter.copy_(master)
        losses.append(total)
    model.eval()
    exchange(model, own[0])
    with torch.no_grad():
        evaluated = loss_of(model, case.inputs(STEPS, 0).to(dtype)).item()
    return Outcome(losses, buffers_of(model), evaluated)


def exchange(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Swap the contents of the buffers with `values`."""
    for buffer, value in zip(model.buffers(), values, strict=True):
        before = buffer.clone()
        buffer.copy_(value)
        value.copy_(before)


def is_statistic(key: str) -> bool:
    return key.endswith(("running_mean", "running_var"))


ROWS = [
    (name, stage, precision) for name in CASES for stage in (0, 1, 2, 3) for precision in ("bf16", "fp16")
]


def types_of(name: str, precision: str) -> dict[str, Any]:
    return {"buffer_dtype": precision} if CASES[name].needs_switch else {}


def all_trained() -> list[Outcome]:
    return [trained(*row, types_of(row[0], row[2])) for row in ROWS]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_equals_plain_torch(world_size: int) -> None:
    """Cases that need the switch run with it."""
    expected = {
        (name, precision): reference(
            name,
            precision,
            world_size,
            lambda key, name=name: (
                bool(CASES[name].needs_switch)  # type: ignore[misc]
                or (is_statistic(key) and name in FOLLOWING)
            ),
        )
        for name in CASES
        for precision in DTYPES
    }
    found, near = run_ranks(world_size, all_trained)[0], 1e-6 if world_size == 1 else 1e-2
    for row, outcome in zip(ROWS, found, strict=True):
        plain = expected[row[0], row[2]]
        assert outcome.losses == pytest.approx(plain.losses, rel=near), row
        assert all(math.isfinite(loss) for loss in outcome.losses), row
        assert {key: dtype for key, (dtype, _) in outcome.buffers.items()} == {
            key: dtype for key, (dtype, _) in plain.buffers.items()
        }, row
        if world_size == 1:
            assert outcome.buffers == plain.buffers, row
        assert outcome.evaluated == pytest.approx(plain.evaluated, rel=near), row


def unswitched() -> dict[tuple[str, int, str, str], tuple[str, str, str]]:
    found = {}
    for name, stage, precision in ROWS:
        if not CASES[name].needs_switch:
            continue
        for entry in ("initialize", "shard"):
            model = CASES[name].model()
            if entry == "shard":
                call, optimizer = zt.shard(model, config(stage, precision))
                engine = optimizer.engine
            else:
                engine, *_ = zt.initialize(model=model, config=config(stage, precision))
                call = engine  # type: ignore[assignment]
            try:
                loss_of(call, CASES[name].inputs(0, 0).to(DTYPES[precision]))
            except Exception as error:
                found[name, stage, precision, entry] = type(error).__name__, str(error), str(error.__cause__)
            engine.close()
    return found


@pytest.mark.ranks
def test_a_kept_buffer_that_meets_a_weight_is_named_with_the_switch() -> None:
    for found in run_ranks(2, unswitched):
        for (name, _, precision, _), (kind, text, cause) in found.items():
            assert kind == "RuntimeError"
            assert f'set data_types.buffer_dtype to "{precision}"' in text
            for buffer in CASES[name].needs_switch:
                assert f"'{buffer}' (float32)" in text
            assert text.startswith(cause.rstrip(". "))
            assert "buffer_dtype" not in cause
        needy = sum(bool(CASES[name].needs_switch) for name, _, _ in ROWS)
        assert len(found) == 2 * needy


@pytest.mark.unit
def test_other_errors_stay_as_they_are() -> None:
    class Failing(Sinusoidal):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such thing")

    engine, *_ = zt.initialize(model=Failing(), config=sgd(0, "bf16"))
    with pytest.raises(RuntimeError) as caught:
        engine(noise(0, BATCH, WIDTH))
    assert str(caught.value) == "no such thing"
    assert caught.value.__cause__ is None
    engine.close()


class Several(nn.Module):
    """A model with floating buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.table = nn.Module()
        self.table.register_buffer("positions", noise(0, 8))
        self.table.register_buffer("wide", noise(1, 1).double().expand(8))
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", noise(2, 4))
        self.register_buffer("phases", torch.complex(noise(3, 4), noise(4, 4)))
        self.register_buffer("packed", noise(5, 4).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("again", self.rotary.get_buffer("inv_freq"))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("types", "cast"),
    [
        ({}, {"norm.running_mean": "bf16", "norm.running_var": "bf16"}),
        (
            {"buffer_dtype": "fp16"},
            {
                "norm.running_mean": "bf16",
                "norm.running_var": "bf16",
                "table.positions": "fp16",
                "table.wide": "fp16",
                "rotary.inv_freq": "fp16",
                "again": "fp16",
            },
        ),
        (
            {"buffer_dtype": "bfloat16", "keep_in_fp32_modules": ["rotary", "norm.*_var", "*.wide"]},
            {"norm.running_mean": "bf16", "table.positions": "bf16"},
        ),
        (
            {"buffer_dtype": "fp32"},
            {"norm.running_mean": "bf16", "norm.running_var": "bf16", "table.wide": "fp32"},
        ),
    ],
)
def test_which_buffers_are_cast(
    types: dict[str, Any], cast: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    model = Several()
    before = {name: value.clone() for name, value in model.named_buffers(remove_duplicate=False)}
    with caplog.at_level(logging.INFO, logger="zerotrain"):
        engine, *_ = zt.initialize(model=model, config=sgd(0, "bf16", data_types=types))
    for name, value in model.named_buffers(remove_duplicate=False):
        dtype = names[cast[name]] if name in cast else before[name].dtype
        assert value.dtype is dtype, name
        assert torch.equal(as_bytes(value), as_bytes(before[name].to(dtype))), name
    assert model.get_buffer("again") is model.get_buffer("rotary.inv_freq")
    assert model.get_buffer("table.wide").stride() == (0,)
    logged = " ".join(record.getMessage() for record in caplog.records)
    assert all((name in logged) is (name in cast) for name in before if name not in ("again", "count"))
    engine.close()


@pytest.mark.unit
def test_cast_buffers_are_stored_as_the_model_gave_them(tmp_path: Any) -> None:
    """A run can thus continue in another precision; a rounded buffer comes back as the model gave it."""
    engine, *_ = zt.initialize(model=Several(), config=sgd(0, "bf16", data_types={"buffer_dtype": "bf16"}))
    engine.module.get_buffer("norm.running_var").fill_(1.0 + 2**-7)
    engine.save_checkpoint(tmp_path, tag="bf16")
    engine.close()
    for precision, types in (
        ("fp32", {}),
        ("bf16", {}),
        ("fp16", {"buffer_dtype": "fp16"}),
        ("bf16", {"buffer_dtype": "bf16"}),
    ):
        model = Several()
        engine, *_ = zt.initialize(model=model, config=sgd(1, precision, data_types=types))
        engine.load_checkpoint(tmp_path, tag="bf16")
        assert float(model.get_buffer("norm.running_var")[0]) == 1.0 + 2**-7
        positions = model.get_buffer("table.positions")
        expected = noise(0, 8).bfloat16().to(positions.dtype)
        assert torch.equal(positions, expected)
        engine.close()
