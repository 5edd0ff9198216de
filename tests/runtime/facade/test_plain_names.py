"""Names are those of the plain model, whatever wraps it or its parts; the user's attributes keep theirs."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

import zerotrain.runtime
from tests.support.tiny_models import TinyBlock, TinyGPT
from tests.support.wrappers import WRAPPED, compiled
from zerotrain.runtime.zero import names
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.plan import persistent_buffers, plan_layout

pytestmark = pytest.mark.unit

CASES = pytest.mark.parametrize("case", WRAPPED)


def tied() -> TinyGPT:
    torch.manual_seed(0)
    model = TinyGPT(layers=2, tied=True)
    model.register_buffer("steps", torch.arange(3))
    model.get_submodule("blocks.0.norm1").register_buffer("scratch", torch.ones(2), persistent=False)
    return model


@CASES
@pytest.mark.parametrize("once", [True, False])
def test_parameters_and_buffers_have_torchs_names_of_the_plain_model(case: str, once: bool) -> None:
    plain, model = tied(), WRAPPED[case](tied())
    found = dict(names.named_parameters(model, remove_duplicate=once))
    expected = dict(plain.named_parameters(remove_duplicate=once))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    buffers = dict(names.named_buffers(model, remove_duplicate=once))
    assert list(buffers) == list(dict(plain.named_buffers(remove_duplicate=once)))
    assert list(persistent_buffers(model)) == ["steps"]


@CASES
def test_modules_have_torchs_names_of_the_plain_model(case: str) -> None:
    model = WRAPPED[case](tied())
    found = list(names.named_modules(model))
    assert [name for name, _ in found] == [name for name, _ in tied().named_modules()]
    outside = dict(found)
    for name, module in names.all_modules(model):
        assert names.innermost(module) is names.innermost(outside[name]), "wrapper and wrapped have one name"
    for name, parameter in names.named_parameters(model):
        assert names.holder_of(model, name)._parameters[name.rpartition(".")[2]] is parameter


@CASES
def test_units_are_those_of_the_plain_model(case: str) -> None:
    layouts = [
        plan_layout(model, world_size=2, compute_dtype="fp32") for model in (tied(), WRAPPED[case](tied()))
    ]
    assert layouts[0] == layouts[1]
    assert layouts[0].aliases == {"head.weight": "embed.weight"}


@CASES
def test_named_units_are_found_inside_wrappers(case: str) -> None:
    for wanted in (["blocks.0"], ["TinyBlock"], [TinyBlock]):
        plain, other = (
            plan_layout(model, world_size=1, compute_dtype="fp32", unit_modules=wanted)
            for model in (tied(), WRAPPED[case](tied()))
        )
        assert plain == other
        assert "blocks.0" in {unit.name for unit in other.units}


@CASES
def test_keys_of_state_dicts(case: str) -> None:
    model = WRAPPED[case](tied())
    keys = [names.plain_key(model, key) for key in model.state_dict()]
    assert sorted(keys) == sorted(tied().state_dict())
    assert names.plain_key(model, "of.nothing_here") == "of.nothing_here"


@CASES
def test_plain_state_dicts_load(case: str) -> None:
    """The keys are as torch's checkpoint_wrapper accepts them, and also torch's own."""
    plain, model = tied(), WRAPPED[case](tied())
    with torch.no_grad():
        plain.embed.weight.fill_(3.0)
    handles = names.accept_plain_keys(model)
    model.load_state_dict(plain.state_dict())
    found = dict(names.named_parameters(model))
    assert found["embed.weight"].eq(3.0).all()
    model.load_state_dict(model.state_dict())
    for handle in handles:
        handle.remove()


@CASES
def test_unwrapped_for_a_moment(case: str) -> None:
    model = WRAPPED[case](tied())
    before = [name for name, _ in model.named_modules()]
    with names.unwrapped(model):
        inside = [name for name, _ in names.innermost(model).named_modules()]
    assert inside == [name for name, _ in tied().named_modules()]
    assert [name for name, _ in model.named_modules()] == before


class Holder(nn.Module):
    """A module with attributes named like those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._checkpoint_wrapped_module(self._orig_mod(self.module(x)))
        return result


@pytest.mark.parametrize("wrap", [lambda model: model, compiled, checkpoint_wrapper])
@pytest.mark.parametrize("depth", [0, 1])
def test_own_attributes_of_these_names_stay(wrap: Callable[[nn.Module], nn.Module], depth: int) -> None:
    def model_of(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return nn.Sequential(change(Holder())) if depth else change(Holder())

    plain, model = model_of(lambda model: model), model_of(wrap)
    expected = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in names.named_parameters(model)] == expected
    assert [names.plain_key(model, key) for key in model.state_dict()] == expected
    assert any("_orig_mod.weight" in name for name in expected)


def test_a_module_that_is_shared_has_the_names_it_has_in_the_plain_model() -> None:
    def shared(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        block = nn.Linear(2, 2)
        return nn.ModuleList([wrap(block), block, wrap(block)])

    plain, model = shared(lambda module: module), shared(compiled)
    for once in (True, False):
        found = [name for name, _ in names.named_parameters(model, remove_duplicate=once)]
        assert found == [name for name, _ in plain.named_parameters(remove_duplicate=once)]
    assert [name for name, _ in names.named_modules(model)] == [name for name, _ in plain.named_modules()]


TORCHS = {"named_parameters", "named_modules", "named_buffers", "named_children"}
RUNTIME = Path(zerotrain.runtime.__path__[0])


def asks_torch(node: ast.AST) -> bool:
    """Return whether code calls torch's method on another module for more than that module's own tensors."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TORCHS):
        return False
    of_self = isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "plain", "names")
    return not of_self and not any(keyword.arg == "recurse" for keyword in node.keywords)


def test_no_other_module_asks_torch_for_names() -> None:
    found = [
        f"{path.relative_to(RUNTIME)}:{node.lineno}"
        for path in RUNTIME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and asks_torch(node)
    ]
    assert found == [], "names of torch's depend on wrappers: take zero/names.py"


class Gated(CheckpointWrapper):
    """A wrapper with a parameter of its own."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self._parameters[name] = nn.Parameter(torch.ones(1))  # torch looks up the name in the wrapped module


def test_two_parts_of_one_name_are_refused() -> None:
    names.check_names(nn.Sequential(Gated(nn.Linear(2, 2), "gate")))
    with pytest.raises(LayoutError, match=r"'0\.bias' is the name of two parts.*Gated.*Linear.*another name"):
        names.check_names(nn.Sequential(Gated(nn.Linear(2, 2), "bias")))
    names.check_names(nn.Sequential(Gated(nn.Linear(2, 2, bias=False), "bias")))
    outer = compiled(nn.Sequential(nn.Linear(2, 2)))
    outer._modules["0"] = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match="'0' is the name of two parts"):
        names.check_names(outer)
