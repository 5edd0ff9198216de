"""The planner's view of a model equals the engine's: parameters, units, and the inputs of the formulas."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import EngineConfig, load, resolve
from zerotrain.contract.memory import (
    MemoryInputs,
    UnitSize,
    gpt_parameter_count,
    gpt_units,
    gpu_persistent,
    gpu_transient,
    memory_inputs,
    optimizer_state_bytes,
    small_parameters,
)
from zerotrain.contract.memory.moved import keeps_own_gradients
from zerotrain.contract.memory.tiers import step_traffic
from zerotrain.contract.train_spec import GptSpec
from zerotrain.runtime.models.gpt import Gpt
from zerotrain.runtime.zero.plan import SmallParameters, plan_layout

pytestmark = pytest.mark.unit


MODELS = [(16, 1, 2, 8), (20, 2, 4, 100), (24, 3, 4, 32), (512, 1, 8, 16)]


def configured(world_size: int, **zero: Any) -> EngineConfig:
    values = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    return resolve(load(values), world_size=world_size)


def unit(name: str, numel: int, **more: bool) -> UnitSize:
    return UnitSize(name=name, numel=numel, padded_numel=numel, **more)


def test_known_model_sizes() -> None:
    assert gpt_parameter_count(d_model=768, layers=12, context=1024, vocab=50_257) == 124_439_808


@pytest.mark.parametrize(("d_model", "layers", "heads", "context"), MODELS)
def test_the_trainers_own_model(d_model: int, layers: int, heads: int, context: int) -> None:
    model = Gpt(GptSpec(d_model=d_model, layers=layers, heads=heads, context=context))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == gpt_parameter_count(d_model=d_model, layers=layers, context=context)
    for ranks, largest, budget in ((1, 0, 0), (3, 3 * d_model, 1 << 40), (4, 1 << 30, 5_000)):
        small = SmallParameters(numel=largest, budget=budget)
        layout = plan_layout(model, world_size=ranks, compute_dtype="bf16", small=small)
        planned = gpt_units(
            d_model=d_model,
            layers=layers,
            context=context,
            world_size=ranks,
            small=(largest, budget),
        )
        assert [(each.name, each.numel, each.padded_numel, each.module == "") for each in layout.units] == [
            (each.name, each.numel, each.padded_numel, each.whole_pass) for each in planned
        ]


def test_inputs_of_the_formulas() -> None:
    units = (
        unit("embed", 8_192, whole_pass=True),
        unit("a", 16_384),
        unit("b", 32_768),
        unit("c", 4_096, trainable=False),
    )
    limits = {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}
    config = configured(4, stage=3, stage3_param_persistence_threshold=0, **limits)
    assert memory_inputs(config, units) == MemoryInputs(
        stage=3,
        world_size=4,
        trainable_numel=57_344,
        frozen_numel=4_096,
        largest_unit_numel=32_768,
        whole_pass_numel=8_192,
        compute_bytes=2,
        grad_bytes=4,
        reduce_bytes=2,
        optimizer_bytes=12,
        whole_pass_grad_numel=8_192,
        forward_live_numel=8_192 + 16_384 + 32_768,
        backward_live_numel=8_192 + 16_384 + 32_768,
        reduce_buffers=2,
    )


def test_small_parameters_stay_whole_at_stage_3() -> None:
    units = (
        unit("(small)", 100, whole_pass=True, stays_whole=True),
        unit("(small)#frozen", 30, trainable=False, whole_pass=True, stays_whole=True),
        unit("d", 500),
    )
    got = memory_inputs(configured(2, stage=3), units)
    assert (got.root_numel, got.frozen_root_numel, got.largest_unit_numel) == (100, 30, 500)
    assert memory_inputs(configured(2, stage=2), units).root_numel == 0
    assert small_parameters(configured(2, stage=3, param_persistence_threshold=7))[0] == 7
    for world_size, stage in ((1, 3), (2, 2)):
        assert small_parameters(configured(world_size, stage=stage)) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "forward", "backward", "kept"),
    [
        ({"prefetch_bucket_size": 0, "max_reuse_distance": 0}, 10, 10, 0),
        ({"prefetch_bucket_size": 1, "max_reuse_distance": 0}, 20, 20, 0),  # one unit ahead at least
        ({"prefetch_bucket_size": 29, "max_reuse_distance": 0}, 30, 30, 0),
        ({"prefetch_bucket_size": 29, "max_live_parameters": 20, "max_reuse_distance": 0}, 20, 20, 0),
        (
            {"prefetch_bucket_size": 0, "max_reuse_distance": 19},
            10,
            10,
            10,
        ),  # the last unit stays: it is next
        ({"prefetch_bucket_size": 0, "max_reuse_distance": 20}, 20, 10, 20),
        ({"prefetch_bucket_size": 0}, 50, 40, 50),  # all stay; the gradients peak one unit later
        ({"prefetch_bucket_size": 0, "max_live_parameters": 39}, 20, 10, 20),
        ({}, 50, 40, 50),
    ],
)
def test_live_weights(limits: dict[str, int], forward: int, backward: int, kept: int) -> None:
    units = tuple(unit(f"blocks.{index}", 10) for index in range(5))
    got = memory_inputs(configured(2, stage=3, param_persistence_threshold=0, **limits), units)
    assert (got.forward_live_numel, got.backward_live_numel, got.kept_live_numel) == (forward, backward, kept)


@pytest.mark.parametrize(
    ("optimizer", "compute_bytes", "expected"),
    [("AdamW", 2, 12), ("AdamW", 4, 8), ("SGD", 2, 4), ("SGD", 4, 0)],
)
def test_state_bytes(optimizer: str, compute_bytes: int, expected: int) -> None:
    config = resolve(load({"optimizer": {"type": optimizer}}), world_size=1)
    assert optimizer_state_bytes(config.optimizer, compute_bytes=compute_bytes) == expected
    assert optimizer_state_bytes(None, compute_bytes=2) == 12


def test_transients_of_the_exchange() -> None:
    """Gathered at once: unit, prefetched, tied; gradients: tied and two units; received: two units."""
    units = (unit("embed", 1_000, whole_pass=True), unit("a", 8_000), unit("b", 8_000))
    limits = {"param_persistence_threshold": 0, "prefetch_bucket_size": 1, "max_reuse_distance": 0}
    zero3 = gpu_transient(memory_inputs(configured(4, stage=3, **limits), units))
    assert zero3.forward_bytes == 2 * (16_000 + 1_000)
    # The last unit prefetches no other, and its gradients are there together with the first one's.
    assert zero3.backward_bytes == 2 * 9_000 + 2 * (16_000 + 1_000) + 2 * 16_000
    zero2 = gpu_transient(memory_inputs(configured(4, stage=2, overlap_comm=False), units))
    assert (zero2.forward_bytes, zero2.backward_bytes) == (0, 2 * 9_000 + 2 * 8_000)
    zero1 = gpu_transient(memory_inputs(configured(4, stage=1, overlap_comm=False), units))
    assert zero1 == zero2
    zero1 = gpu_transient(memory_inputs(configured(4, stage=1, overlap_comm=True), units))
    assert (zero1.backward_bytes, zero1.step_bytes) == (2 * (16_000 + 1_000) + 2 * 2 * 8_000, 0)
    zero0 = gpu_transient(memory_inputs(configured(4, stage=0), units))
    assert (zero0.backward_bytes, zero0.step_bytes) == (2 * 9_000, 4 * 8_000)
    alone = gpu_transient(memory_inputs(configured(1, stage=3), units))
    assert (alone.forward_bytes, alone.step_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({}, True),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, True),
        ({"gradient_accumulation_steps": 2}, False),
        ({"managed_gradient_accumulation": False}, False),
        ({"bf16": {"enabled": False}}, False),
        ({"optimizer": {"type": "OneBitAdam"}}, False),
        ({"zero_optimization": {"stage": 0}}, False),
        ({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}, True),
    ],
)
def test_stage_1_keeps_its_own_part_of_the_gradients_of_one_pass(
    file: dict[str, Any], expected: bool
) -> None:
    whole = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **file}
    config = resolve(load(whole), world_size=4)
    assert keeps_own_gradients(config) is expected
    kept = gpu_persistent(memory_inputs(config, (unit("a", 8_000),))).grad_bytes
    assert kept == 4 * 8_000 // (4 if expected else 1)


def test_one_rank_keeps_what_stage_0_keeps() -> None:
    units = gpt_units(d_model=32, layers=2, context=64, world_size=1)
    totals = {
        gpu_persistent(memory_inputs(configured(1, stage=stage), units)).total_bytes for stage in range(4)
    }
    assert len(totals) == 1


@pytest.mark.parametrize(("stage", "ranks", "bytes_of_parts"), [(0, 4, 2 * 5000), (3, 4, 2 * (4096 + 904))])
def test_muon_holds_and_sends_a_ranks_parts_of_matrices(stage: int, ranks: int, bytes_of_parts: int) -> None:
    units = [
        UnitSize(name="a", numel=16384, padded_numel=16384, matrix_numel=4096),
        UnitSize(name="b", numel=16384, padded_numel=16384, matrix_numel=904),
    ]
    found = {}
    for kind in ("AdamW", "Muon"):
        values = {
            "bf16": {"enabled": True},
            "optimizer": {"type": kind},
            "zero_optimization": {"stage": stage},
        }
        inputs = memory_inputs(resolve(load(values), world_size=ranks), units)
        found[kind] = inputs.optimizer_bytes, gpu_transient(inputs), step_traffic(inputs).network_bytes
    (states, _, sent), (muon_states, transient, muon_sent) = found["AdamW"], found["Muon"]
    assert muon_states == states
    assert transient.step_bytes >= bytes_of_parts
    assert muon_sent - sent == (0 if stage == 0 else 2 * bytes_of_parts)
