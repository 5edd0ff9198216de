"""Buffers in checkpoints: every dtype and view comes back to the bit, on any number of ranks.

Unsuitable buffers are refused by name before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zerotrain.runtime as zt
from tests.support.buffers import DTYPES, bits_of, noise, sgd
from tests.support.ranks import run_ranks
from zerotrain.runtime.checkpoint import CheckpointMismatch
from zerotrain.runtime.checkpoint.compare import Side, differences
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint
from zerotrain.runtime.zero.strided import as_bytes

IN_FORMAT = set(DTYPES) - {"complex32", "complex128", "float4_e2m1fn_x2"}
"""Dtypes that safetensors has."""


class Buffers(nn.Module):
    """A model with one buffer of every dtype and of every kind of view."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("expanded", noise(seed, 1).expand(6))
        self.register_buffer("transposed", noise(seed, 3, 4).t())
        self.register_buffer("window", noise(seed, 9).unfold(0, 3, 1))
        self.register_buffer("scalar", noise(seed, 1)[0])
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("scratch", noise(seed, 6), persistent=False)
        self.register_buffer("conjugate", torch.complex(noise(seed, 4), noise(seed + 1, 4)).conj())
        self.register_buffer("shared", self.get_buffer("transposed"))
        for name, dtype in DTYPES.items():
            self.register_buffer(f"of_{name}", bits_of(seed, dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(inputs)
        return hidden


def stored_bytes(model: nn.Module) -> dict[str, bytes]:
    """Return the bytes of every buffer that is saved."""
    return {
        name: as_bytes(buffer).numpy().tobytes()
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name != "scratch"
    }


def saved(folder: str, stage: int, asynchronous: bool) -> None:
    engine, *_ = zt.initialize(model=Buffers(seed=0), config=sgd(stage))
    engine.save_checkpoint(folder, tag="all", asynchronous=asynchronous)
    engine.close()


def loaded(folder: str, stage: int) -> dict[str, bytes]:
    model = Buffers(seed=1)
    engine, *_ = zt.initialize(model=model, config=sgd(stage))
    scratch = model.get_buffer("scratch").clone()
    engine.load_checkpoint(folder, tag="all")
    assert torch.equal(model.get_buffer("scratch"), scratch)
    assert model.get_buffer("expanded").stride() == (0,)
    assert model.get_buffer("shared") is model.get_buffer("transposed")
    engine.close()
    return stored_bytes(model)


@pytest.mark.unit
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_buffer_comes_back_to_the_bit(asynchronous: bool, tmp_path: Path) -> None:
    saved(str(tmp_path), 1, asynchronous)
    assert loaded(str(tmp_path), 3) == stored_bytes(Buffers(seed=0))


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 1)])
def test_on_any_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(before, saved, str(tmp_path), 3, before == 3)
    expected = stored_bytes(Buffers(seed=0))
    assert run_ranks(after, loaded, str(tmp_path), 2) == [expected] * after


@pytest.mark.unit
def test_exports_hold_every_buffer(tmp_path: Path) -> None:
    """Dtypes that safetensors lacks are exported as bytes, which load_weights converts back."""
    model = Buffers(seed=0)
    engine, *_ = zt.initialize(model=model, config=sgd(1))
    engine.save_checkpoint(tmp_path / "checkpoints", tag="all")
    engine.save_16bit_model(tmp_path / "engine", dtype="fp32")
    engine.close()
    request = Request(
        checkpoint=tmp_path / "checkpoints",
        tag="all",
        output=tmp_path / "exported",
        dtype=torch.float32,
        max_bytes=1 << 30,
    )
    export_checkpoint(request)
    for folder in ("engine", "exported"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        for name, value in stored_bytes(model).items():
            stored = tensors["transposed"] if name == "shared" else tensors[name]
            assert as_bytes(stored).numpy().tobytes() == value, name
            if (dtype := name.removeprefix("of_")) in IN_FORMAT:
                assert stored.dtype is DTYPES[dtype]
        fresh = Buffers(seed=1)
        zt.load_weights(fresh, tmp_path / folder)
        zt.materialize(fresh)
        assert stored_bytes(fresh) == stored_bytes(model)


@pytest.mark.unit
def test_checkpoints_of_any_dtype_are_compared(tmp_path: Path) -> None:
    for seed in (0, 1):
        engine, *_ = zt.initialize(model=Buffers(seed), config=sgd(0))
        engine.save_checkpoint(tmp_path / str(seed), tag="all")
        engine.close()
    first, second = (Side(tmp_path / str(seed) / "all") for seed in (0, 1))
    assert all(found.is_equal for found in differences(first, first))
    other = {found.fqn for found in differences(first, second) if not found.is_equal}
    assert other >= {f"of_{dtype}" for dtype in DTYPES} - {"of_bool"}


def with_buffers(*, linear: float = 1.0, **buffers: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    nn.init.constant_(model[0].get_parameter("weight"), linear)
    for name, value in buffers.items():
        model.register_buffer(name, value)
    return model


def with_scratch() -> nn.Module:
    model = with_buffers()
    model.register_buffer("table", torch.zeros(8), persistent=False)
    return model


def tied_buffers() -> nn.Module:
    value = torch.zeros(8)
    return with_buffers(table=value, more=value)


STORED = {"table": torch.arange(8.0) + 0.5}
MISFITS: Mapping[str, tuple[Any, dict[str, torch.Tensor], str]] = {
    "longer": (
        lambda: with_buffers(table=torch.zeros(16)),
        STORED,
        r"buffer 'table' has shape \[16\] in the model and \[8\] in the checkpoint",
    ),
    "another shape of one size": (lambda: with_buffers(table=torch.zeros(2, 4)), STORED, r"shape \[2, 4\]"),
    "broadcastable": (lambda: with_buffers(table=torch.zeros(2, 8)), STORED, r"shape \[2, 8\]"),
    "int64": (
        lambda: with_buffers(table=torch.zeros(8, dtype=torch.int64)),
        STORED,
        r"buffer 'table' is torch.int64 in the model and torch.float32 in the checkpoint",
    ),
    "fp64": (lambda: with_buffers(table=torch.zeros(8).double()), STORED, "is torch.float64 in the model"),
    "bf16": (lambda: with_buffers(table=torch.zeros(8).bfloat16()), STORED, "load_module_strict=False"),
    "complex64": (
        lambda: with_buffers(table=torch.zeros(8, dtype=torch.complex64)),
        STORED,
        "is torch.complex64 in the model",
    ),
    "uint8 for bool": (
        lambda: with_buffers(table=torch.zeros(8, dtype=torch.uint8)),
        {"table": torch.zeros(8).bool()},
        "is torch.uint8 in the model and torch.bool",
    ),
    "surplus": (with_buffers, STORED, "holds buffer 'table', which the model does not have"),
    "not persistent any more": (with_scratch, STORED, "holds buffer 'table', which the model does not"),
    "missing": (
        lambda: with_buffers(table=torch.zeros(8), more=torch.zeros(1)),
        STORED,
        "holds no buffer 'more'",
    ),
    "expanded now": (
        lambda: with_buffers(table=torch.zeros(1).expand(8)),
        STORED,
        "'table' is an expanded view in the model",
    ),
    "shared now": (
        tied_buffers,
        {**STORED, "more": torch.zeros(8)},
        "'(more|table)' is the same tensor as '(table|more)' in the model",
    ),
}


def misfit(name: str, folder: str) -> None:
    build, stored, text = MISFITS[name]
    engine, *_ = zt.initialize(model=with_buffers(linear=2.0, **stored), config=sgd(1))
    engine.save_checkpoint(folder, tag="old")
    engine.close()
    model = build()
    engine, *_ = zt.initialize(model=model, config=sgd(1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=text):
        engine.load_checkpoint(folder, tag="old")
    assert {key: value.tolist() for key, value in model.state_dict().items()} == {
        key: value.tolist() for key, value in before.items()
    }
    engine.close()


@pytest.mark.unit
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    misfit(name, str(tmp_path))


@pytest.mark.ranks
def test_every_rank_refuses(tmp_path: Path) -> None:
    run_ranks(2, misfit, "longer", str(tmp_path))


@pytest.mark.unit
@pytest.mark.parametrize("name", ["surplus", "not persistent any more", "missing", "bf16", "fp64"])
def test_without_strictness(name: str, tmp_path: Path) -> None:
    """Buffers of other names are skipped, and floating numbers rounded; nothing else changes."""
    build, stored, _ = MISFITS[name]
    engine, *_ = zt.initialize(model=with_buffers(linear=2.0, **stored), config=sgd(1))
    engine.save_checkpoint(tmp_path, tag="old")
    engine.close()
    model = build()
    engine, *_ = zt.initialize(model=model, config=sgd(1))
    engine.load_checkpoint(tmp_path, tag="old", load_module_strict=False)
    engine.close()
    assert model[0].get_parameter("weight").detach().eq(2).all()
    buffers = dict(model.named_buffers())
    if "table" in buffers:
        kept = torch.zeros(8) if name == "not persistent any more" else STORED["table"]
        assert torch.equal(buffers["table"].double(), kept.double())


@pytest.mark.unit
@pytest.mark.parametrize("name", ["longer", "int64", "complex64", "expanded now", "shared now"])
def test_without_strictness_what_cannot_be_held_is_refused(name: str, tmp_path: Path) -> None:
    build, stored, text = MISFITS[name]
    engine, *_ = zt.initialize(model=with_buffers(linear=2.0, **stored), config=sgd(1))
    engine.save_checkpoint(tmp_path, tag="old")
    engine.close()
    engine, *_ = zt.initialize(model=build(), config=sgd(1))
    with pytest.raises(CheckpointMismatch, match=text):
        engine.load_checkpoint(tmp_path, tag="old", load_module_strict=False)
    engine.close()
