"""Stages 1 and 2 gather each unit right after its update, and what uses it next waits for that gather.

The gathers of these tests land when they are waited for, and what they fill holds NaN until then.
"""

from __future__ import annotations

import atexit
import copy
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerotrain.runtime as zt
from tests.support.collectives import watch_collectives
from tests.support.free_form import config
from tests.support.just_in_time import WIDTH, Chain, batch, contents
from tests.support.late_gathers import land_late
from tests.support.ranks import run_ranks, use_transport
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import world
from zerotrain.runtime.comm.mismatch import CommError
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.optim.update import StepUpdate
from zerotrain.runtime.train import digest
from zerotrain.runtime.zero import replicas
from zerotrain.runtime.zero.hooks import has_compiled_code

pytestmark = pytest.mark.ranks

BLOCK = "blocks.1.weight"
Read = Callable[[Engine, nn.Parameter], Any]


def started(
    stage: int = 2, *, overlap: bool = True, kind: str = "AdamW", is_bf16: bool = False, **zero: Any
) -> Engine:
    """Return an engine whose steps end before their gathers, as they do by default on a GPU."""
    torch.manual_seed(3)
    settings = {
        "train_batch_size": 4,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": is_bf16, "auto_cast": True},
        "optimizer": {"type": kind, "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "overlap_comm": overlap, **zero},
    }
    engine, *_ = zt.initialize(model=Chain(), config=settings, unit_modules=[nn.Linear])
    if stage == 3:  # as on a GPU
        engine.core.updates.replicas._may_stay = overlap and not engine.comm.shares_memory
    land_late(engine)
    return engine


def step(engine: Engine, index: int = 0, **kwargs: Any) -> None:
    engine.backward(engine(batch(index), **kwargs))
    engine.step()


def in_flight(engine: Engine) -> list[str]:
    return [unit.name for unit in engine.core.units if unit in engine.core.updates.replicas]


def over_messages(function: Callable[..., Any], *args: Any) -> list[Any]:
    with use_transport("gloo"):
        return run_ranks(2, function, *args)


def order_of_events(stage: int) -> list[tuple[str, str]]:
    """Return updates, gathers, forwards and waits for gathers of a step and of the forward that follows."""
    engine = started(stage)
    step(engine)
    engine.synchronize()
    events = watch_collectives(engine)
    run = StepUpdate.run

    def noted(update: StepUpdate, name: str) -> None:
        run(update, name)
        events.append(("updated", name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepUpdate, "run", noted)
        engine.backward(engine(batch(1)))
        events.clear()
        engine.step()
    assert in_flight(engine) == [f"blocks.{index}" for index in range(4)]
    for name, block in engine.module.get_submodule("blocks").named_children():
        block.register_forward_hook(lambda *_, name=name: events.append(("forward", f"blocks.{name}")))
    engine(batch(2))
    assert not in_flight(engine)
    engine.close()
    return [event for event in events if event[1].startswith("blocks")]


@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_follow_updates_and_are_waited_for_by_forward(stage: int) -> None:
    names = [f"blocks.{index}" for index in range(4)]
    expected = [(what, name) for name in names for what in ("updated", "all_gather")]
    expected += [(what, name) for name in names for what in ("all_gather done", "forward")]
    assert over_messages(order_of_events, stage) == [expected] * 2


def saved(engine: Engine) -> list[bytes]:
    """Return the exported weights; rank 0 writes them."""
    with tempfile.TemporaryDirectory() as folder:
        engine.save_16bit_model(folder)
        return [file.read_bytes() for file in Path(folder).glob("*.safetensors")]


def whole(engine: Engine) -> list[list[float]]:
    with zt.full_parameters(engine.module):
        return [weight.detach().flatten().tolist() for weight in engine.module.parameters()]


def written_back(engine: Engine) -> list[list[float]]:
    """Return the weights after a write on rank 0 into one of them."""
    with zt.full_parameters(engine.module, modifier_rank=0), torch.no_grad():
        engine.module.get_parameter("blocks.0.bias").zero_()
    return whole(engine)


def pickled(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save({key: value.clone() for key, value in module.state_dict().items()}, file)
    return file.getvalue()


@torch.no_grad()
def averaged(module: nn.Module) -> list[torch.Tensor]:
    averages = [torch.zeros(weight.shape) for weight in module.parameters()]
    torch._foreach_lerp_(averages, list(module.parameters()), 0.5)
    return averages


@torch.no_grad()
def scaled(weight: nn.Parameter) -> torch.Tensor:
    """Write, then read."""
    weight.mul_(2.0)
    weight.mul_(0.5)
    return weight.clone()


def of_a_fork(weight: nn.Parameter) -> int:
    """Return whether a forked process found only numbers in a weight, as its exit code."""
    if (child := os.fork()) == 0:
        os._exit(7 if bool(weight.detach().isfinite().all()) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def reload(engine: Engine) -> dict[str, bytes]:
    """Load what a module has over itself."""
    state = {
        key: value.clone() for key, value in engine.module.get_submodule("blocks.0").state_dict().items()
    }
    engine.module.get_submodule("blocks.0").load_state_dict(state)
    return contents(engine)


def trained_on(engine: Engine) -> list[list[float]]:
    step(engine, 5)
    return whole(engine)


READS: dict[str, Read] = {
    "sum": lambda _, weight: weight.detach().sum(),
    "data": lambda _, weight: weight.data.clone(),
    "repr": lambda _, weight: repr(weight),
    "deepcopy": lambda _, weight: copy.deepcopy(weight),
    "numpy": lambda _, weight: weight.detach().numpy().copy(),
    "address": lambda _, weight: torch.Tensor.data_ptr(weight) and weight.data.sum(),
    "state dict": lambda engine, _: pickled(engine.module),
    "operation of torch": lambda _, weight: functional.linear(torch.ones(1, WIDTH), weight),
    "list of weights": lambda engine, _: averaged(engine.module),
    "vector": lambda engine, _: nn.utils.parameters_to_vector(engine.module.parameters()).sum(),
    "fork": lambda _, weight: of_a_fork(weight),
    "own part": lambda _, weight: zt.get_local_fp32(weight),
    "submodule": lambda engine, _: engine.module.get_submodule("blocks.1")(batch(3)),
    "evaluation": lambda engine, _: engine.eval()(batch(3)).item() + 0.0 * len(str(engine.train())),
}
"""Reads that any rank may do alone."""
TOGETHER: dict[str, Read] = {
    "export": lambda engine, _: saved(engine),
    "module state dict": lambda engine, _: (
        pickled(engine.module) + repr(sorted(engine.module_state_dict().items(), key=str)).encode()
    ),
    "checkpoint": lambda engine, _: contents(engine),
    "full_parameters": lambda engine, _: whole(engine),
    "written back": lambda engine, _: written_back(engine),
    "master": lambda _, weight: zt.get_full_fp32(weight),
    "state": lambda _, weight: zt.get_full_optimizer_state(weight, "exp_avg"),
    "digest": lambda engine, _: digest.digest(engine),
    "load": lambda engine, _: reload(engine),
    "write": lambda _, weight: scaled(weight),
    "training": lambda engine, _: trained_on(engine),
}
"""Reads in which all ranks take part."""


def read_twice(stage: int) -> dict[str, bool]:
    """Return, per read, whether its result right after a step is that of one after `synchronize`."""
    equal = {}
    for name, read in (READS | TOGETHER).items():
        found = []
        for waits in (False, True):
            engine = started(stage)
            for index in range(2):
                step(engine, index)
            assert len(in_flight(engine)) == 4
            if waits:
                engine.synchronize()
                assert not in_flight(engine)
            if name in TOGETHER or world()[0] == 0:
                found.append(repr(read(engine, engine.module.get_parameter(BLOCK))))
            step(engine, 2)
            engine.close()
        equal[name] = len(set(found)) <= 1 and "nan" not in "".join(found)
    return equal


@pytest.mark.parametrize("stage", [1, 2])
def test_every_read_after_a_step_waits(stage: int) -> None:
    assert over_messages(read_twice, stage) == [dict.fromkeys(READS | TOGETHER, True)] * 2


RUNS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3, small ones whole": {"stage": 3, "stage3_param_persistence_threshold": 64},
    "just in time": {"stage": 2, "offload_optimizer": {"device": "cpu", "just_in_time": True}},
    "offloaded": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "jointly": {"stage": 1, "kind": "Lamb"},
}


def trained() -> dict[str, dict[str, bytes]]:
    """Return what each run computed; ranks leave out different blocks in one of the steps."""
    found = {}
    for name, run in RUNS.items():
        engine = started(**run)
        for index in range(5):
            leaves_out = world()[0] + 1 if index == 3 and run["stage"] < 3 else None
            step(engine, index, leaves_out=leaves_out)
        found[name] = contents(engine)
        engine.close()
    return found


def test_the_bits_are_those_of_steps_that_wait() -> None:
    late, waited = over_messages(trained), run_ranks(2, trained)
    for name in RUNS:
        assert [rank[name] for rank in late] == [rank[name] for rank in waited], name


def end_of_process() -> list[str]:
    engine = started()
    step(engine)
    assert in_flight(engine)
    atexit._run_exitfuncs()
    return in_flight(engine)


def test_the_end_of_the_process_waits() -> None:
    """The other ranks would miss what this one has not sent."""
    assert over_messages(end_of_process) == [[], []]


def step_in_a_context() -> list[dict[str, bytes]]:
    """Return what a step within the context, whose end writes back, leaves; where it waits, and where not."""
    found = []
    for overlap in (True, False):
        engine = started(overlap=overlap, is_bf16=True)
        with zt.full_parameters(engine.module, modifier_rank=0):
            step(engine)
            assert bool(in_flight(engine)) is overlap
        found.append(contents(engine))
        engine.close()
    return found


def test_a_step_within_full_parameters_is_written_back() -> None:
    for late, waited in over_messages(step_in_a_context):
        assert late == waited


def failing() -> list[str]:
    """Return the errors of calls after a gather that failed when it was waited for."""
    engine = started()
    gather: Any = engine.comm.all_gather

    def fail() -> None:
        raise CommError("rank 1 is gone")

    changed: Any = engine.comm
    changed.all_gather = lambda full, shard, *, label: (
        Pending(fail) if label == "blocks.2" else gather(full, shard, label=label)
    )
    step(engine)
    changed.all_gather = gather
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for call in (lambda: engine(batch(1)), lambda: engine.save_checkpoint(folder), engine.synchronize):
            with pytest.raises(CommError) as raised:
                call()
            errors.append(str(raised.value))
    return errors


def test_an_error_of_a_gather_is_final() -> None:
    for errors in over_messages(failing):
        assert all("rank 1 is gone" in error for error in errors), errors


def left_in_flight(overlap: bool, is_compiled: bool) -> list[str]:
    engine = started(overlap=overlap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "has_compiled_code", lambda: is_compiled)
        step(engine)
        found = in_flight(engine)
    engine.close()
    return found


def test_steps_wait_where_nothing_overlaps() -> None:
    assert over_messages(left_in_flight, False, False) == [[], []]
    assert run_ranks(2, left_in_flight, True, False) == [[], []], "ranks share their memory"
    assert over_messages(left_in_flight, True, True) == [[], []], "guards of compiled code see parameters"


def steps_of_blocks(how: str) -> tuple[list[float], list[str], bool]:
    """Return losses of steps, the units in flight after the last one, and whether code was compiled."""
    torch.manual_seed(3)
    settings = config(2, compile={"enabled": how == "configured", "backend": "eager"})
    settings["zero_optimization"]["overlap_comm"] = True
    engine, *_ = zt.initialize(model=TinyGPT(layers=2), config=settings)
    if how == "called":
        engine.compile(backend="eager")
    land_late(engine)
    losses = []
    for tokens, targets in token_batches(3, size=2):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = in_flight(engine)
    engine.close()
    return losses, found, has_compiled_code()


@pytest.mark.parametrize("how", ["configured", "called"])
def test_units_that_the_engine_compiles_are_whole_before_their_guards(how: str) -> None:
    eager, compiled = (over_messages(steps_of_blocks, each) for each in ("eager", how))
    for before, (losses, found, has_compiled) in zip(eager, compiled, strict=True):
        assert (losses, found) == before[:2]
        assert has_compiled
        assert {"blocks.0", "blocks.1"} <= set(found)
