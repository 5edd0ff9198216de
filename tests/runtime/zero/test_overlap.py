"""Reduction during the backward pass changes only its timing: the bits are the same with and without."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from torch import nn

import zerotrain.runtime as zt
from tests.support.collectives import Events, watch_collectives
from tests.support.device import DEVICE
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import Case, Outcome, largest_difference, train_with_engine, world
from zerotrain.runtime.engine import Engine

pytestmark = pytest.mark.ranks


# (stage, dtype, accumulation, bucket): overlap on against off.
VARIANTS = tuple(product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2)))
BUCKETS = (1, 20_000)


def case(stage: int, dtype: str, accumulation: int, *, overlap: bool, bucket: int = 500_000_000) -> Case:
    extra = {"overlap_comm": overlap, "reduce_bucket_size": bucket}
    return Case(stage=stage, dtype=dtype, accumulation=accumulation, extra=extra, steps=2, tied=True)


def train_all(cases: list[Case]) -> list[Outcome]:
    return [train_with_engine(each) for each in cases]


@cache
def outcomes() -> list[tuple[str, Outcome, Outcome]]:
    pairs = [(case(*each, overlap=False), case(*each, overlap=True)) for each in VARIANTS]
    pairs += [
        (case(1, "bf16", 1, overlap=False), case(1, "bf16", 1, overlap=True, bucket=bucket))
        for bucket in BUCKETS
    ]
    flat = [each for pair in pairs for each in pair]
    results = run_ranks(2, train_all, flat)[0]
    return [(str(flat[i + 1]), results[i], results[i + 1]) for i in range(0, len(flat), 2)]


def test_same_bits_with_and_without_overlap() -> None:
    for name, without, with_overlap in outcomes():
        assert without.losses == with_overlap.losses, name
        assert without.norms == with_overlap.norms, name
        assert largest_difference(without, with_overlap) == 0.0, name


def moments(stage: int, overlap: bool, accumulation: int) -> list[int]:
    """Return, per micro-batch of one step, exchanges that started before backward reached the embedding."""
    setting = case(stage, "fp32", accumulation, overlap=overlap)
    engine, *_ = zt.initialize(model=setting.model(), config=setting.config(2))
    events = watch_collectives(engine)
    counts = []
    for index, batch in enumerate(token_batches(2 * accumulation, size=2)):
        parts = [part.chunk(2)[world()[0]] for part in batch]
        early: list[int] = []
        first_block = engine.module.get_submodule("blocks.0")
        handle = first_block.register_full_backward_hook(
            lambda *_, e=early: e.append(sum(name == "exchange" for name, _ in events))
        )
        engine.backward(engine(*parts))
        handle.remove()
        engine.step()
        if index >= accumulation:  # from the second step on the order of units is known
            counts.append(early[0])
        events.clear()
    engine.close()
    return counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_units_travel_while_backward_goes_on(stage: int) -> None:
    """Stages 0 and 1 send units only in the last micro-batch of a step."""
    on = run_ranks(2, moments, stage, True, 2)[0]
    assert on[1] >= 2
    assert on[0] == (0 if stage < 2 else on[1])
    off = run_ranks(2, moments, stage, False, 2)[0]
    assert off == ([0, 0] if stage < 2 else on)


def gathers_at_once(bucket: int) -> int:
    """Return the most gathers of updated units in flight in the second step of stage 1."""
    setting = case(1, "fp32", 1, overlap=False)
    settings = setting.config(2)
    settings["zero_optimization"]["allgather_bucket_size"] = bucket
    engine, *_ = zt.initialize(model=setting.model(), config=settings)
    tokens, targets = token_batches(1, size=2)[0]
    events: Events = []
    for step in range(2):
        if step:
            events = watch_collectives(engine)
        engine.backward(engine(tokens, targets))
        engine.step()
    flying, most = 0, 0
    for name, unit in events:
        if unit and name.startswith("all_gather") and unit != "step record":
            flying += -1 if name.endswith("done") else 1
            most = max(most, flying)
    engine.close()
    return most


@pytest.mark.skipif(DEVICE == "cuda", reason="steps on a GPU end while all units are gathered")
def test_gathers_of_updated_units_are_bounded() -> None:
    assert run_ranks(2, gathers_at_once, 1)[0] == 2  # the next one starts before the last one is waited for
    assert run_ranks(2, gathers_at_once, 500_000_000)[0] >= 4


def plain_descent(stage: int, overlap: bool, **entries: Any) -> tuple[nn.Module, Engine]:
    """Return an engine with SGD, in which a gradient counted twice shows; Adam would divide it away."""
    setting = case(stage, "fp32", 1, overlap=overlap)
    model = setting.model()
    config = {**setting.config(2), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **entries}
    engine, *_ = zt.initialize(model=model, config=config)
    return model, engine


def backwards_of(stage: int, overlap: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Do two backward passes before a step, through one retained graph and then a second graph."""
    model, engine = plain_descent(stage, overlap)
    for tokens, targets in token_batches(2, size=2):
        rank = world()[0]
        mine = (tokens.chunk(2)[rank], targets.chunk(2)[rank])
        loss = engine(*mine)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.backward(engine(*mine))
        engine.step()
    with zt.full_parameters(model):
        result = {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}
    engine.close()
    return result


def test_several_backward_passes_before_a_step() -> None:
    """All stages agree with stage 0 without overlap, which sends nothing before the step."""
    expected = run_ranks(2, backwards_of, 0, False)[0]
    for stage, overlap in ((0, True), (1, True), (2, True), (3, True)):
        for got in run_ranks(2, backwards_of, stage, overlap):
            for name, value in expected.items():
                assert np.abs(got[name] - value).max() < 1e-6, f"stage {stage}: {name}"


def second_order(stage: int) -> str:
    setting = case(stage, "fp32", 1, overlap=True)
    engine, *_ = zt.initialize(model=setting.model(), config=setting.config(2))
    tokens, targets = token_batches(1, size=2)[0]
    loss = engine(tokens, targets)
    try:
        loss.backward(create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_second_order_gradients_are_refused_where_weights_are_freed() -> None:
    assert "create_graph=True is not possible at stage 3" in run_ranks(2, second_order, 3)[0]
    assert run_ranks(2, second_order, 2)[0] == ""


def with_no_sync(stage: int, overlap: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Run two micro-batches without communication and one with, then one step by hand."""
    model, engine = plain_descent(stage, overlap)
    sent = []
    for _ in range(2):
        for index, (tokens, targets) in enumerate(token_batches(3, size=2)):
            rank = world()[0]
            mine = (tokens.chunk(2)[rank], targets.chunk(2)[rank])
            before = engine.comm.bytes_sent.total()
            if index < 2:
                with engine.no_sync():
                    engine.backward(engine(*mine))
                sent.append(engine.comm.bytes_sent.total() - before)
            else:
                engine.backward(engine(*mine))
        engine.step()
    assert sent == [0] * 4
    with zt.full_parameters(model):
        result = {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}
    engine.close()
    return result


def by_set_boundary(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    """Run the same three micro-batches, with the boundary set by hand."""
    model, engine = plain_descent(stage, True)
    for _ in range(2):
        for index, (tokens, targets) in enumerate(token_batches(3, size=2)):
            rank = world()[0]
            engine.set_gradient_accumulation_boundary(index == 2)
            engine.backward(engine(tokens.chunk(2)[rank], targets.chunk(2)[rank]))
            result = engine.step()
            assert result.at_boundary == (index == 2)
    assert engine.global_steps == 2
    with zt.full_parameters(model):
        weights = {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}
    engine.close()
    return weights


def unmanaged(stage: int) -> dict[str, np.ndarray[Any, Any]]:
    """Run them again with every `step` being an optimizer step."""
    model, engine = plain_descent(stage, True, managed_gradient_accumulation=False)
    for _ in range(2):
        for tokens, targets in token_batches(3, size=2):
            rank = world()[0]
            engine.backward(engine(tokens.chunk(2)[rank], targets.chunk(2)[rank]))
        assert engine.step().at_boundary
    assert engine.global_steps == 2
    with zt.full_parameters(model):
        weights = {name: value.detach().cpu().numpy().copy() for name, value in model.named_parameters()}
    engine.close()
    return weights


def test_no_sync_and_boundaries_set_by_hand() -> None:
    expected = run_ranks(2, with_no_sync, 0, False)[0]
    for stage, overlap in ((0, True), (1, False), (1, True)):
        for got in run_ranks(2, with_no_sync, stage, overlap):
            assert all(np.array_equal(got[name], value) for name, value in expected.items()), stage
    for stage in (0, 1, 2, 3):
        for got in (*run_ranks(2, by_set_boundary, stage), *run_ranks(2, unmanaged, stage)):
            difference = max(float(np.abs(got[name] - value).max()) for name, value in expected.items())
            assert difference < 1e-6, stage


def misuse_of_no_sync(stage: int) -> str:
    setting = case(stage, "fp32", 1, overlap=True)
    engine, *_ = zt.initialize(model=setting.model(), config=setting.config(2))
    with engine.no_sync():
        engine.step()
    return "nothing raised"


def test_no_sync_is_refused_with_a_reason() -> None:
    with pytest.raises(RankFailed, match=r"zero_optimization.stage 2 does not keep"):
        run_ranks(2, misuse_of_no_sync, 2)
    with pytest.raises(RankFailed, match=r"step\(\) cannot be called within no_sync"):
        run_ranks(2, misuse_of_no_sync, 1)
