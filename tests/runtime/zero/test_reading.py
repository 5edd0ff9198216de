"""Every known way to read a sharded parameter either works or raises ParameterSharded; none crashes.

Each way runs in a forked process of its own, so that a crash is recognised.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.forkserver import in_new_interpreter
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.zero.hooks import COMPILER

pytestmark = pytest.mark.ranks


Way = Callable[[nn.Module, nn.Parameter], Any]

REFUSED: dict[str, Way] = {
    "deepcopy of the state dict": lambda model, p: copy.deepcopy(model.state_dict()),
    "deepcopy of the parameter": lambda model, p: copy.deepcopy(p),
    "norm": lambda model, p: p.norm(),
    "arithmetic": lambda model, p: p + 1,
    "reversed arithmetic": lambda model, p: 1 - p,
    "comparison": lambda model, p: bool((p == 0).any()),
    "item access": lambda model, p: p[0],
    "item assignment": lambda model, p: p.data.__setitem__(0, 0.0),
    "iteration": lambda model, p: list(p),
    "data": lambda model, p: p.data.sum(),
    "detach": lambda model, p: p.detach().sum(),
    "clone": lambda model, p: p.clone(),
    "numpy": lambda model, p: p.detach().cpu().numpy(),
    "asarray": lambda model, p: np.asarray(p.detach()),
    "tolist": lambda model, p: p.tolist(),
    "data_ptr": lambda model, p: p.data_ptr(),
    "untyped_storage": lambda model, p: bytes(p.untyped_storage()),
    "pickle": lambda model, p: pickle.dumps(p),
    "torch.save": lambda model, p: torch.save(model.state_dict(), io.BytesIO()),
    "foreach": lambda model, p: torch._foreach_norm(list(model.parameters())),
    "aten": lambda model, p: torch.ops.aten.sum(p),
    "functional": lambda model, p: nn.functional.linear(torch.ones(1, 16), p),
    "stack": lambda model, p: torch.stack([p, p]),
    "to vector": lambda model, p: nn.utils.parameters_to_vector(model.parameters()),
    "in place": lambda model, p: p.add_(1),
    "zero_": lambda model, p: nn.init.zeros_(p),
    "out": lambda model, p: torch.add(torch.ones(16, 16), 1, out=p),
    "copy from": lambda model, p: torch.zeros(16, 16).copy_(p),
    "half": lambda model, p: model.half(),
    "moving": lambda model, p: model.to(torch.float64),
    "from_dlpack": lambda model, p: np.from_dlpack(p),
    "torch optimizer": lambda model, p: torch_step(model, p),
    "format": lambda model, p: f"{p.sum()}",
}

UNCOPIED: dict[str, Way] = {
    "deepcopy of the model": lambda model, p: copy.deepcopy(model),
    "torch.save of the module": lambda model, p: torch.save(model, io.BytesIO()),
}

HARMLESS: dict[str, Way] = {
    "print": lambda model, p: print(p, model, list(model.named_parameters()), file=io.StringIO()),
    "repr": lambda model, p: repr(p),
    "shape": lambda model, p: (p.shape, p.size(), p.dim(), p.numel(), len(p), p.dtype, p.device, p.ndim),
    "grad": lambda model, p: (p.grad, p.requires_grad, p.is_leaf),
    "hash and identity": lambda model, p: (p in set(model.parameters()), list(model.parameters()).index(p)),
    "zero_grad": lambda model, p: model.zero_grad(),
    "count": lambda model, p: sum(parameter.numel() for parameter in model.parameters()),
    "train": lambda model, p: (model.train(), model.eval()),
    # These call no hook. They find not-a-numbers of the right shape, or old memory that is mapped still.
    "torch.tensor": lambda model, p: only_nan(torch.tensor(p)),
    "dlpack capsule": lambda model, p: torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(p)).sum(),
    "raw subclass": lambda model, p: torch.Tensor._make_subclass(torch.Tensor, p).sum(),
}


def torch_step(model: nn.Module, parameter: nn.Parameter) -> None:
    """Use torch's optimizer on sharded parameters."""
    parameter.grad = torch.ones(parameter.shape)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def only_nan(values: torch.Tensor) -> None:
    if not values.isnan().all():
        raise AssertionError(f"values appeared: {values}")


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def sharded_model() -> nn.Module:
    """Return a model after one step at stage 3."""
    model = stack()
    engine, *_ = zt.initialize(model=model, config=config(3), unit_modules=["0", "1"])
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
    return model


def outcome_of(way: Way, model: nn.Module, parameter: nn.Parameter) -> str:
    """Return the outcome from a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a way that waits for the other rank must not hang the test
        try:
            way(model, parameter)
            text = "worked"
        except zt.ParameterSharded as error:
            text = f"refused {error.fqn}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text if status == 0 else f"crashed with signal {os.waitstatus_to_exitcode(status)}"


def all_outcomes() -> dict[str, str]:
    model = sharded_model()
    parameter = model.get_parameter("0.weight")
    if world()[0]:
        return {}  # all ranks see the same
    return {
        name: outcome_of(way, model, parameter) for name, way in {**REFUSED, **UNCOPIED, **HARMLESS}.items()
    }


def test_every_way_of_reading() -> None:
    outcomes = run_ranks(2, all_outcomes)[0]
    expected = dict.fromkeys(REFUSED, "refused 0.weight") | dict.fromkeys(HARMLESS, "worked")
    for name in UNCOPIED:
        assert "an engine drives this model, so it cannot be copied or pickled" in outcomes.pop(name)
    assert outcomes == expected


def copies(stage: int) -> tuple[bool, list[str]]:
    """Return whether torch's compiler is imported, and the outcomes of copying a model at this stage."""
    model = stack()
    knows_compiler = COMPILER in sys.modules
    zt.initialize(model=model, config=config(stage))
    parameter = next(model.parameters())
    return knows_compiler, [outcome_of(way, model, parameter) for way in UNCOPIED.values()]


@pytest.mark.parametrize("knows_compiler", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_with_hooks_is_not_copied(stage: int, knows_compiler: bool) -> None:
    (found,) = run_ranks(1, copies, stage) if knows_compiler else [in_new_interpreter(copies, stage)]
    assert found[0] == knows_compiler
    assert all("an engine drives this model, so it cannot be copied" in outcome for outcome in found[1])


def segfault() -> str:
    return outcome_of(lambda model, p: ctypes.string_at(0), stack(), nn.Parameter(torch.ones(1)))


def test_the_harness_sees_a_crash() -> None:
    assert run_ranks(1, segfault) == ["crashed with signal -11"]


def keep_aliases() -> list[bool]:
    """Read aliases of weights after the weights are sharded again; they were taken while these were whole."""
    model = stack()
    kept: list[torch.Tensor] = []
    first = model[0]
    first.register_forward_pre_hook(
        lambda module, args: kept.extend([module.weight.detach(), module.weight.t()])
    )
    engine, *_ = zt.initialize(model=model, config=config(3), unit_modules=["0", "1"])
    with torch.no_grad():
        engine(torch.ones(2, 16))
    return [bool(torch.isfinite(alias.sum())) for alias in kept]


def test_aliases_taken_in_forward_do_not_crash_later() -> None:
    assert run_ranks(2, keep_aliases)[0] == [True, True]


def gathered_values() -> dict[str, bool]:
    """Check that full_parameters shows the trained values, and writes reach the masters."""
    model = sharded_model()
    with zt.full_parameters(model):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        saved = copy.deepcopy(model.state_dict())
    seen = {"state dict": all(torch.equal(saved[name], value) for name, value in before.items())}
    with zt.full_parameters(model.get_submodule("1"), write=True), torch.no_grad():
        model.get_parameter("1.weight").fill_(0.25)
    with zt.full_parameters(model):
        weight = model.get_parameter("1.weight")
        seen["written"] = bool((weight == 0.25).all())
        seen["neighbour"] = torch.equal(model.get_parameter("0.weight"), before["0.weight"])
    seen["hidden again"] = "values on other ranks" in repr(model.get_parameter("1.weight"))
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_parameters_read_and_write(world_size: int) -> None:
    for seen in run_ranks(world_size, gathered_values):
        if world_size == 1:
            del seen["hidden again"]  # one rank holds everything
        assert all(seen.values()), seen


def use_in_forward() -> str:
    model = stack()
    engine, *_ = zt.initialize(model=model, config=config(3), unit_modules=["0", "1"])

    def nested(module: nn.Module, args: Any) -> None:
        with zt.full_parameters(model):
            pass

    model[1].register_forward_pre_hook(nested)
    try:
        engine(torch.ones(2, 16))
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


def test_full_parameters_is_refused_inside_forward() -> None:
    assert "while the model is in forward" in run_ranks(2, use_in_forward)[0]
