"""Unusual sequences of calls: evaluation in between, plain backward, errors midway, two engines at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import delay_collectives
from tests.support.free_form import config
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import whole_parameters, world
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.state import whole

pytestmark = pytest.mark.ranks


Batch = tuple[torch.Tensor, torch.Tensor]
Weights = dict[str, np.ndarray[Any, Any]]


def engine_at(stage: int, seed: int = 5, **extra: Any) -> Engine:
    torch.manual_seed(seed)
    engine, *_ = zt.initialize(model=TinyGPT(layers=2), config=config(stage, **extra))
    return engine


def batches(count: int) -> list[Batch]:
    rank, world_size = world()
    parts = [tuple(part.chunk(world_size)[rank] for part in batch) for batch in token_batches(count, size=4)]
    return [(tokens, targets) for tokens, targets in parts]


def weights(engine: Engine) -> Weights:
    with zt.full_parameters(engine.module):
        return whole_parameters(engine.module)


def train(engine: Engine, batch: Batch) -> None:
    engine.backward(engine(*batch))
    engine.step()


def straight(stage: int) -> Weights:
    engine = engine_at(stage)
    for batch in batches(3):
        train(engine, batch)
    return weights(engine)


def with_evaluation(stage: int) -> Weights:
    """Forward passes without gradients before, between and after, and one with unused gradients."""
    engine = engine_at(stage)
    for batch in batches(3):
        for context in (torch.no_grad, torch.inference_mode):
            engine.eval()
            with context():
                engine(*batch)
            assert engine.memory.transient_bytes == 0
            engine.train()
        engine(*batch)
        train(engine, batch)
    return weights(engine)


def with_plain_backward(stage: int) -> Weights:
    """Use the user's own `loss.backward()`, as trainers that own their loop do."""
    engine = engine_at(stage)
    for batch in batches(3):
        engine.module(*batch).backward()
        engine.step()
    return weights(engine)


class Trip(Exception):
    pass


def trip(*_: Any) -> None:
    raise Trip


def with_errors(stage: int) -> Weights:
    """Raise an error in forward and one in backward, caught on all ranks, and continue."""
    engine = engine_at(stage)
    for batch in batches(3):
        handle = engine.module.get_submodule("blocks.1").register_forward_pre_hook(trip)
        with pytest.raises(Trip):
            engine(*batch)
        handle.remove()
        train(engine, batch)
    loss = engine(*batches(1)[0])
    loss.register_hook(trip)
    with pytest.raises(Trip):
        engine.backward(loss)
    assert engine.memory.transient_bytes == 0
    return weights(engine)


def two_engines(stage: int) -> Weights:
    """Another model trains in the same process, step by step, alternately."""
    engine, other = engine_at(stage), engine_at(stage, seed=6)
    for batch in batches(3):
        loss, other_loss = engine(*batch), other(*batch)
        other.backward(other_loss)
        engine.backward(loss)
        engine.step()
        other.step()
    return weights(engine)


def with_delays(stage: int) -> Weights:
    """Delay every rank's collectives, each time by a random time of its own."""
    engine = engine_at(stage)
    delay_collectives(engine, seed=world()[0])
    for batch in batches(3):
        train(engine, batch)
    return weights(engine)


@pytest.mark.parametrize("stage", with_slow_rows([1, 2, 3], quick=[1, 3]))
@pytest.mark.usefixtures("each_transport")
def test_unusual_sequences_change_nothing(stage: int) -> None:
    expected = run_ranks(2, straight, stage)[0]
    for sequence in (with_evaluation, with_plain_backward, with_errors, two_engines, with_delays):
        for got in run_ranks(2, sequence, stage):
            for name, value in expected.items():
                assert np.array_equal(got[name], value), f"{sequence.__name__}: {name}"


def bf16_plain(stage: int) -> tuple[Weights, Weights]:
    engine = engine_at(stage, bf16={"enabled": True})
    plain = engine_at(stage, bf16={"enabled": True})
    for batch in batches(3):
        train(engine, batch)
        plain.module(*batch).backward()
        plain.step()
    return weights(engine), weights(plain)


def test_plain_backward_with_narrow_gradients() -> None:
    for stage in (1, 3):
        for expected, got in run_ranks(2, bf16_plain, stage):
            for name, value in expected.items():
                assert np.array_equal(got[name], value), name


def without_failures(stage: int, settings: dict[str, Any]) -> Weights:
    engine = engine_at(stage, **settings)
    for _ in range(2):
        for batch in batches(2):
            train(engine, batch)
    return weights(engine)


def fail_late(engine: Engine, batch: Batch, *, own: bool) -> None:
    """Run a backward pass that raises when the last block has its gradients."""
    block = engine.module.get_submodule("blocks.1")
    handle = block.register_forward_pre_hook(lambda _, args: (args[0].register_hook(trip), None)[1])
    loss = engine(*batch)
    handle.remove()
    with pytest.raises(Trip):
        loss.backward() if own else engine.backward(loss)


def with_failures(stage: int, settings: dict[str, Any]) -> Weights:
    """Let backward passes raise, in the engine's and in the caller's call; their gradients are dropped."""
    engine = engine_at(stage, **settings)
    for own in (False, True):
        fail_late(engine, batches(1)[0], own=own)
        if own:
            engine.module(*batches(1)[0])  # a forward pass ends what the caller's backward began
        with pytest.raises(RuntimeError, match=r"gradients are incomplete; call zero_grad\(\)"):
            engine.step()
        engine.zero_grad()
        engine.backward(engine(*batches(1)[0]))
        engine.optimizer.zero_grad()  # a batch that is left out
        for batch in batches(2):
            train(engine, batch)
    assert engine.memory.transient_bytes == 0
    return weights(engine)


def each_stage_and_dtype() -> None:
    for stage in (0, 1, 3):
        for dtype in ("fp32", "bf16"):
            settings = {"bf16": {"enabled": dtype == "bf16"}}
            expected, got = without_failures(stage, settings), with_failures(stage, settings)
            for name, value in expected.items():
                assert np.array_equal(got[name], value), f"stage {stage}, {dtype}: {name}"


@pytest.mark.usefixtures("each_transport")
def test_zero_grad_drops_what_a_failed_backward_left() -> None:
    run_ranks(2, each_stage_and_dtype)


def use_closed(stage: int) -> list[str]:
    """Return the answer of every method after `close`, which may be called again."""
    engine = engine_at(stage)
    loss = engine(*batches(1)[0])
    engine.close()
    engine.close()
    messages = []
    uses: tuple[Callable[[], object], ...] = (
        lambda: engine(*batches(1)[0]),
        lambda: engine.backward(loss),
        engine.step,
        engine.zero_grad,
        lambda: engine.save_checkpoint("nowhere"),
        lambda: engine.load_checkpoint("nowhere"),
        lambda: engine.save_16bit_model("nowhere"),
        engine.module_state_dict,
        lambda: zt.get_full_fp32(next(engine.module.parameters())),
    )
    for use in uses:
        with pytest.raises(RuntimeError) as caught:
            use()
        messages.append(str(caught.value))
    return messages


def test_a_closed_engine_raises_a_clear_error() -> None:
    for messages in run_ranks(2, use_closed, 3):
        assert all(message.endswith("is closed") for message in messages), messages


def forget(stage: int) -> list[bool]:
    """Return whether engine, core and model are alive after their last reference is gone."""
    engine = engine_at(stage)
    train(engine, batches(1)[0])
    engine.close()
    watched: list[weakref.ref[Any]] = [
        weakref.ref(engine),
        weakref.ref(engine.core),
        weakref.ref(engine.module),
    ]
    del engine
    gc.collect()
    return [reference() is not None for reference in watched]


def test_a_closed_engine_is_freed() -> None:
    for world_size, stage in ((1, 0), (2, 3)):
        assert run_ranks(world_size, forget, stage) == [[False] * 3] * world_size


def closed() -> list[bool]:
    """Return, per module, whether a model with whole weights is plain again after close()."""
    engine = engine_at(1)
    train(engine, batches(1)[0])
    engine.close()
    model = engine.module
    return [not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()]


def test_close_removes_every_hook() -> None:
    assert all(run_ranks(2, closed)[0])


def test_results_are_plain_numbers() -> None:
    engine, *_ = zt.initialize(model=nn.Linear(4, 1), config=config(0))
    engine.backward(engine(torch.ones(1, 4)).sum())
    result = engine.step()
    assert (type(result.grad_norm), type(result.lr), result.step, result.skipped) == (float, float, 1, False)
    assert result.grad_norm == pytest.approx(5**0.5)


def clamp_weights(stage: int, dtype: str) -> tuple[bool, bool]:
    """Write to whole weights in place on all ranks; return whether checkpoint and next step have them."""
    engine = engine_at(stage, bf16={"enabled": dtype == "bf16"})
    train(engine, batches(1)[0])
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.clamp_(-0.05, 0.05)  # the norms' weights are near 1
    streams = engine.checkpoint_state().streams
    masters = [whole(stream) for (_, kind), stream in streams.items() if kind == "master"]
    saved = all(float(stream.abs().max()) < 0.06 for stream in masters)
    engine(*batches(1)[0])
    train(engine, batches(1)[0])
    trained = max(float(zt.get_full_fp32(each).abs().max()) for each in engine.module.parameters())
    return saved, trained < 0.1


def clamp_everywhere() -> list[tuple[bool, bool]]:
    return [clamp_weights(stage, dtype) for stage in (0, 1, 2) for dtype in ("fp32", "bf16")]


@pytest.mark.usefixtures("each_transport")
def test_writes_to_whole_weights_last() -> None:
    for found in run_ranks(2, clamp_everywhere):
        assert found == [(True, True)] * 6


def load_into_running(stage: int, dtype: torch.dtype) -> bool:
    """Call `load_state_dict` on a running model: the next step starts from the loaded values."""
    engine = engine_at(stage, bf16={"enabled": dtype is torch.bfloat16})
    train(engine, batches(1)[0])
    torch.manual_seed(1)
    other = TinyGPT(layers=2)
    engine.module.load_state_dict(other.state_dict())
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, batches(1)[0])
    wanted = other.state_dict()
    return all(
        torch.equal(value, wanted[name].to(dtype)) for name, value in engine.module.state_dict().items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2])
def test_loading_a_state_dict_reaches_the_masters(stage: int, dtype: torch.dtype) -> None:
    assert run_ranks(2, load_into_running, stage, dtype) == [True, True]


def replace_and_train(stage: int) -> list[str]:
    """The error of a step after the model's parameters were taken from under the engine."""
    messages = []
    for change in (
        lambda model: model.load_state_dict(TinyGPT(layers=2).state_dict(), assign=True),
        lambda model: setattr(model.norm, "weight", nn.Parameter(torch.ones(16))),
        lambda model: model.to(torch.float64).to(torch.float32),
        lambda model: setattr(model, "adapter", nn.Linear(2, 2)),
        lambda model: setattr(model, "adapter", nn.Linear(2, 2).requires_grad_(False)),
    ):
        engine = engine_at(stage)
        train(engine, batches(1)[0])
        try:
            change(engine.module)
            train(engine, batches(1)[0])
        except (LayoutError, zt.ParameterSharded) as error:
            messages.append(str(error))
        else:
            messages.append("trained on")
        engine.close()
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_left_are_named(stage: int) -> None:
    for assigned, one, converted, new, frozen in run_ranks(2, replace_and_train, stage):
        assert "['" in assigned
        assert "parameters ['norm.weight'] were replaced or moved after initialize" in one
        assert ("were replaced or moved" if stage < 3 else "partitioned over the ranks") in converted
        assert "['adapter.weight', 'adapter.bias']" in new
        assert frozen == "trained on"


def load_sharded() -> str:
    engine = engine_at(3)
    try:
        engine.module.load_state_dict(TinyGPT(layers=2).state_dict())
    except (zt.ParameterSharded, RuntimeError) as error:
        return str(error)
    return "nothing raised"


def test_loading_into_sharded_parameters_is_refused() -> None:
    assert "full_parameters" in run_ranks(2, load_sharded)[0]
