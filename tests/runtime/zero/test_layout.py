"""The division of a model into units, and the place of every element."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.tiny_models import TinyBlock, TinyGPT
from zerotrain.contract.config import LeafModuleConfig
from zerotrain.runtime.zero.layout import ALIGN, LayoutError, ModelLayout, ParameterFact, build_unit
from zerotrain.runtime.zero.plan import plan_layout

pytestmark = pytest.mark.unit


SHAPES = st.lists(st.lists(st.integers(1, 70), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8)


@given(shapes=SHAPES, world_size=st.integers(1, 9), align=st.sampled_from([1, 8, ALIGN]))
@settings(max_examples=60, deadline=None)
def test_every_element_is_owned_once(shapes: list[tuple[int, ...]], world_size: int, align: int) -> None:
    facts = [ParameterFact(fqn=f"p{i}", shape=shape, dtype="fp32") for i, shape in enumerate(shapes)]
    unit = build_unit(
        name="u", module="u", trainable=True, parameters=facts, world_size=world_size, align=align
    )
    layout = ModelLayout(units=(unit,), world_size=world_size, align=align)
    owners = torch.zeros(unit.padded_numel)
    for rank in range(world_size):
        start, stop = layout.shard_range(unit, rank)
        assert (stop - start) % align == 0
        owners[start:stop] += 1
        for segment, low, high in layout.owned_segments(unit, rank):
            assert start <= low < high <= stop
            assert segment.start <= low < high <= segment.stop
    assert bool((owners == 1).all())
    for segment, shape in zip(unit.segments, shapes, strict=True):
        assert segment.numel == torch.empty(shape).numel()
    for before, after in pairwise(unit.segments):
        assert before.stop <= after.start


def names(model: nn.Module, **options: object) -> dict[str, list[str]]:
    layout = plan_layout(model, world_size=2, compute_dtype="bf16", **options)  # type: ignore[arg-type]
    return {unit.name: [segment.fqn for segment in unit.segments] for unit in layout.units}


def test_blocks_embedding_and_head_are_units() -> None:
    units = names(TinyGPT(layers=2))
    assert list(units) == ["(root)", "embed", "blocks.0", "blocks.1", "head"]
    assert units["(root)"] == ["norm.weight", "norm.bias"]
    assert len(units["blocks.0"]) == len(list(TinyBlock().parameters()))


class Routed(nn.Module):
    """A block outside of any list, whose experts would be units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


@pytest.mark.parametrize(
    "leaves",
    [
        LeafModuleConfig(classes=("Routed",)),
        LeafModuleConfig(classes=(f"{__name__}.Routed",)),
        LeafModuleConfig(names=("0", "1")),
        LeafModuleConfig(name_suffixes=("0", "1")),
    ],
)
def test_leaf_modules_are_units_that_hold_none(leaves: LeafModuleConfig) -> None:
    model = nn.Sequential(Routed(), Routed())
    assert len(names(model)) == 9
    assert list(names(model, leaves=leaves)) == ["0", "1"]
    assert list(names(model, leaves=leaves, unit_modules=["0.experts.1"])) == ["0", "1"]


def test_a_module_with_tied_and_own_parameters_has_two_units() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    model.register_parameter("top", first.bias)
    assert names(model, unit_modules=["0", "1"]) == {
        "(root)": ["top"],
        "0": ["0.weight"],
        "1": ["1.bias"],
    }
    del model.top
    assert names(model, unit_modules=["0", "1"]) == {
        "0#shared": ["0.weight"],
        "0": ["0.bias"],
        "1": ["1.bias"],
    }


def test_tied_weights_have_one_owner_above_all_users() -> None:
    layout = plan_layout(TinyGPT(layers=1, tied=True), world_size=2, compute_dtype="fp32")
    assert layout.aliases == {"head.weight": "embed.weight"}
    assert layout.find("head.weight") == layout.find("embed.weight")
    unit, _ = layout.find("embed.weight")
    assert unit.module == ""
    assert unit.name == "embed"


def test_frozen_parameters_get_a_buffer_of_their_own() -> None:
    model = TinyGPT(layers=2)
    model.blocks[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    layout = plan_layout(model, world_size=2, compute_dtype="bf16")
    frozen = {unit.name for unit in layout.units if not unit.trainable}
    assert frozen == {"blocks.0#frozen", "embed#frozen"}


def test_integer_parameters_keep_their_dtype() -> None:
    model = TinyGPT(layers=1)
    model.blocks[0].codes = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
    model.blocks[0].scale = nn.Parameter(torch.zeros(8), requires_grad=False)
    layout = plan_layout(model, world_size=2, compute_dtype="bf16")
    assert {unit.name: unit.dtype for unit in layout.units if not unit.trainable} == {
        "blocks.0#frozen.int8": "int8",
        "blocks.0#frozen.bf16": "bf16",
    }


def test_unit_modules_replace_the_rule() -> None:
    assert list(names(TinyGPT(layers=2), unit_modules=["TinyBlock"])) == ["(root)", "blocks.0", "blocks.1"]
    assert list(names(TinyGPT(layers=2), unit_modules=["blocks.1", nn.Embedding])) == [
        "(root)",
        "embed",
        "blocks.1",
    ]
    with pytest.raises(LayoutError, match=r"names 'Block', which is neither a module .* nor .*'TinyBlock'"):
        names(TinyGPT(), unit_modules=["Block"])


def test_the_layout_is_a_pure_function() -> None:
    first, second = (plan_layout(TinyGPT(), world_size=4, compute_dtype="bf16") for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    other = plan_layout(TinyGPT(), world_size=2, compute_dtype="bf16")
    assert first.fingerprint() != other.fingerprint()


def test_errors_name_what_is_wrong() -> None:
    layout = plan_layout(TinyGPT(), world_size=2, compute_dtype="fp32")
    with pytest.raises(LayoutError, match=r"rank must be in \[0, 2\); got 2"):
        layout.shard_range("embed", 2)
    with pytest.raises(LayoutError, match="no unit named 'nope'"):
        layout.unit("nope")
    with pytest.raises(LayoutError, match=r"no parameter named 'nope.weight'"):
        layout.find("nope.weight")
    mixed = [
        ParameterFact(fqn="a", shape=(1,), dtype="fp32"),
        ParameterFact(fqn="b", shape=(1,), dtype="bf16"),
    ]
    with pytest.raises(LayoutError, match=r"one known dtype .* got \['bf16', 'fp32'\]"):
        build_unit(name="u", module="", trainable=True, parameters=mixed, world_size=1)
