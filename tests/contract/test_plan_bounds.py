"""Bounds on the cost of a plan: the operator makes it on its event loop, from specs that tenants write."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import load, resolve
from zerotrain.contract.memory.live import LiveRules, replay_live
from zerotrain.contract.planner import Demand, Fit, Limit, Tier, Workload, demand, gpt_shape, nearest
from zerotrain.contract.planner import proposals as searched
from zerotrain.contract.planner.shape import MAX_GUESSED_LAYERS, ModelShape, guessed_shape
from zerotrain.contract.train_spec import GptSpec

pytestmark = pytest.mark.unit


GIB = 1 << 30


def hopeless(shape: ModelShape) -> Workload:
    written = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 64}
    return Workload(
        shape=shape,
        config=resolve(load(written), world_size=64),
        ranks_per_worker=8,
        on_host=False,
        limits={Tier.GPU: Limit(num_bytes=GIB, source="a test"), Tier.HOST: Limit(num_bytes=1, source="it")},
    )


@pytest.mark.parametrize("layers", [2, 96, 1024])
def test_a_search_is_bounded_by_the_model_and_by_number(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gpt_shape(GptSpec(d_model=65536, layers=layers, heads=64, context=1 << 20), source="a test")
    looked_at: list[int] = []

    def counted(workload: Workload) -> Demand:
        looked_at.append(len(workload.shape.modules))
        return demand(workload)

    monkeypatch.setattr(searched, "demand", counted)
    workload = hopeless(shape)
    assert demand(workload).verdict is Fit.DOES_NOT_FIT
    assert nearest(workload) is None
    assert 1 <= len(looked_at) <= searched.MAX_EVALUATIONS
    assert sum(looked_at) <= searched.MAX_MODULES + len(shape.modules)


@pytest.mark.parametrize("parameters", [10**12, 10**15])
def test_a_guess_has_no_more_layers_than_any_model_has(parameters: int) -> None:
    shape = guessed_shape(parameters)
    assert shape.layers <= MAX_GUESSED_LAYERS
    assert shape.parameters == parameters


class Counted(tuple[int, ...]):
    """Sizes that count how often one is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 10, 10**15])
def test_the_replay_looks_at_every_unit_a_few_times_only(prefetch: int) -> None:
    sizes = Counted([7] * 2000)
    Counted.reads = 0
    rules = LiveRules(prefetch=prefetch, max_live=10**18, max_reuse=0)
    replay_live(sizes, whole_pass=0, rules=rules, reduce_buffers=2)
    assert Counted.reads <= 20 * len(sizes)
