"""The byte formulas give the users' tables to the digit, and agree with a count of every buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerotrain.contract.config import load, resolve
from zerotrain.contract.memory import (
    MemoryInputs,
    Offloaded,
    disk_bytes,
    fitting,
    gpt_units,
    gpu_persistent,
    gpu_transient,
    host_bytes,
    kept_states,
    memory_inputs,
    padded_numel,
    step_traffic,
)

pytestmark = pytest.mark.unit


STAGES = (0, 1, 2, 3)
GB = 10**9


def inputs(stage: int, **more: object) -> MemoryInputs:
    """Return a small model in 16 bit on 4 ranks, with every number different."""
    base = MemoryInputs(
        stage=3, world_size=4, trainable_numel=80_000, largest_unit_numel=24_000, frozen_numel=4_000
    )
    return replace(base, stage=stage, **more)  # type: ignore[arg-type]


def published(stage: int, numel: int, ranks: int) -> int:
    """Return bytes as the published tables count them: 16 bit, 12 bytes of state, no replicated
    parameters.
    """
    return gpu_persistent(inputs(stage, world_size=ranks, trainable_numel=numel, frozen_numel=0)).total_bytes


@pytest.mark.parametrize(
    ("numel", "ranks", "expected_gb"),
    [
        (7_000_000_000, 8, {0: 112.0, 1: 38.5, 2: 26.25, 3: 14.0}),
        (7_500_000_000, 64, {0: 120.0, 1: 31.40625, 2: 16.640625, 3: 1.875}),
    ],
)
def test_published_tables(numel: int, ranks: int, expected_gb: dict[int, float]) -> None:
    for stage, expected in expected_gb.items():
        assert published(stage, numel, ranks) / GB == expected


def test_the_rounded_figures_of_the_paper() -> None:
    figures = [round(published(stage, 7_500_000_000, 64) / GB, 1) for stage in STAGES]
    assert figures == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("compute", "grad", "state"), [(2, 2, 12), (2, 4, 12), (4, 4, 8), (2, 2, 10)])
def test_persistent_equals_a_count_of_tensors(stage: int, compute: int, grad: int, state: int) -> None:
    """Lay out units of a few thousand elements as the engine does and add up what one rank keeps."""
    ranks, units, small = 2, (8_192, 24_576, 16_384), 4_096
    kept = 0
    for numel in (*units, small):
        shard = numel // ranks
        kept += compute * (shard if stage == 3 and numel != small else numel)
        kept += grad * (shard if stage >= 2 else numel)
        kept += state * (shard if stage >= 1 else numel)
    given = MemoryInputs(
        stage=stage,  # type: ignore[arg-type]
        world_size=ranks,
        trainable_numel=sum(units) + small,
        root_numel=small,
        compute_bytes=compute,
        grad_bytes=grad,
        optimizer_bytes=state,
    )
    assert gpu_persistent(given).total_bytes == kept


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    for stage, expected in ((0, 8_000), (1, 8_000), (2, 8_000), (3, 2_000)):
        assert gpu_persistent(inputs(stage)).frozen_bytes == expected


def test_frozen_units_that_stay_whole() -> None:
    gpu = gpu_persistent(inputs(3, frozen_root_numel=1_000))
    assert (gpu.frozen_bytes, gpu.replicated_bytes) == (2 * 750, 2_000)


def test_transients() -> None:
    n_max = 24_000
    for stage in (0, 1):
        small = gpu_transient(inputs(stage, reduce_bytes=4))
        assert (small.forward_bytes, small.backward_bytes, small.step_bytes) == (0, 4 * 2 * n_max, 0)
    live = {"forward_live_numel": 2 * n_max, "backward_live_numel": 3 * n_max}
    plain = gpu_transient(inputs(3, **live))
    assert plain.forward_bytes == 2 * 2 * n_max
    assert plain.backward_bytes == 2 * 3 * n_max + 2 * 2 * n_max + 2 * 2 * n_max
    assert plain.peak_bytes == plain.backward_bytes
    assert gpu_transient(inputs(3, largest_unit_numel=0)).peak_bytes == 0


def test_offload_moves_and_loses_nothing() -> None:
    on_gpu = gpu_persistent(inputs(3))
    for tier in ("cpu", "nvme"):
        moved = inputs(3, optimizer_tier=tier, param_tier=tier)
        gpu, host = gpu_persistent(moved), host_bytes(moved)
        assert (gpu.param_bytes, gpu.frozen_bytes, gpu.optimizer_bytes) == (0, 0, 0)
        assert gpu.grad_bytes == on_gpu.grad_bytes, "they are summed there"
        assert host.grad_bytes == 3 * gpu.grad_bytes, "and copied here, three units at a time"
        elsewhere = host.optimizer_bytes + host.param_bytes + disk_bytes(moved)
        params = -(-2 * 20_000 // 4096) * 4096 if tier == "nvme" else 2 * 20_000
        frozen = 4096 if tier == "nvme" else 2 * 1_000
        assert (on_gpu.param_bytes, on_gpu.frozen_bytes) == (2 * 20_000, 2 * 1_000)
        assert elsewhere == params + frozen + on_gpu.optimizer_bytes
        assert host_bytes(replace(moved, on_host=True)).grad_bytes == 0
    assert host_bytes(inputs(3)).total_bytes == 0
    assert disk_bytes(inputs(3)) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_what_stays_leaves_the_disk(stage: int) -> None:
    share = 80_000 if stage == 0 else 20_000
    for moved in (0, share // 4, share):
        split = inputs(stage, optimizer_tier="nvme", optimizer_bytes=10, offloaded=Offloaded(states=(moved,)))
        assert gpu_persistent(split).optimizer_bytes + disk_bytes(split) == 10 * share
        assert disk_bytes(split) == 10 * moved
        assert step_traffic(split).nvme_bytes == 20 * moved


def test_ring_and_tags() -> None:
    units = Offloaded(states=(2**20 + 4_096, 20_480), disk_params=(65_536, 67_584), disk_frozen=(77_824,))
    host = host_bytes(
        inputs(3, optimizer_tier="nvme", param_tier="nvme", optimizer_bytes=10, offloaded=units)
    )
    whole_shards = 2 * 2 * 77_824 + 3 * 2 * 67_584
    assert host.ring_bytes == 5 * 10 * 2**20 + whole_shards
    assert host.tag_bytes == 28 * ((64 + 1 + 2) + (1 + 2) + 2)
    plain = inputs(3, optimizer_tier="nvme", offloaded=units, is_encrypted=False)
    assert host_bytes(plain).tag_bytes == 64 + 1 + 2 + 1 + 2 + 2
    up = inputs(2, optimizer_tier="cpu")
    assert host_bytes(up).ring_bytes == 2 * 2 * 20_000, "updated weights on their way to the accelerator"
    assert host_bytes(replace(up, on_host=True)).ring_bytes == 0


def test_a_step_moves_twenty_bytes_of_each_parameter() -> None:
    """States with remainders are read and written once each, encrypted or not; padding is included."""
    units = gpt_units(d_model=768, layers=12, context=128, vocab=50_304, world_size=2)
    file = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
    }
    found = step_traffic(memory_inputs(resolve(load(file), world_size=2), units, on_host=True))
    per_rank = sum(unit.numel for unit in units) / 2
    assert 20.0 <= found.nvme_bytes / per_rank <= 20.1
    assert (found.pcie_up_bytes, found.pcie_down_bytes) == (0, 0)


def test_whole_units_fit_a_budget_in_order() -> None:
    assert fitting((5, 9, 3, 2), 10) == {0, 2, 3}
    assert kept_states((5, 9, 3, 3), 1.0) == frozenset()
    assert kept_states((5, 9, 3, 3), 0.5) == {0, 2}
    assert kept_states((5, 9, 3, 3), 0.0) == {0, 1, 2, 3}


def test_a_save_in_the_background_copies_decoded_masters() -> None:
    split = inputs(1, optimizer_tier="cpu", optimizer_bytes=10, splits_masters=True, saves_in_background=True)
    assert host_bytes(split).snapshot_bytes == 12 * 20_000 + 2 * 1_000
    assert host_bytes(replace(split, optimizer_tier="nvme")).snapshot_bytes == 0, "spills are written at once"


def test_traffic_in_units_of_the_model() -> None:
    """M = 2 bytes per parameter: 2 M below stage 3, 3 M at stage 3, 2 M between nodes with hpZ. Of F bytes of
    frozen weights, 2 F at stage 3, F between nodes with hpZ, and nothing below stage 3.
    """
    model, frozen = 2 * 80_000, 2 * (4_000 - 1_000)
    assert [step_traffic(inputs(stage, frozen_root_numel=1_000)).network_bytes for stage in STAGES] == [
        2 * model,
        2 * model,
        2 * model,
        3 * model + 2 * frozen,
    ]
    assert (
        step_traffic(inputs(3, hpz_ranks=2, frozen_root_numel=1_000)).cross_node_bytes == 2 * model + frozen
    )
    assert step_traffic(inputs(3, world_size=1)).network_bytes == 0
    block = 256
    scales = 4 / block
    plus = inputs(3, hpz_ranks=2, quantized_weights=True, quantized_gradients=True, quant_block_numel=block)
    plus = replace(plus, frozen_numel=0)
    assert step_traffic(plus).cross_node_bytes == int(80_000 * (1 + scales + 0.5 + scales))
    assert step_traffic(inputs(3, micro_steps=4, frozen_numel=0)).network_bytes == 4 * 3 * model
    assert step_traffic(inputs(1, micro_steps=4)).network_bytes == 2 * model
    spilled = inputs(3, optimizer_tier="nvme", param_tier="nvme", micro_steps=2)
    passes = 2 * 2 * 2 * (20_000 + 1_000)
    assert step_traffic(spilled).nvme_bytes == 2 * 12 * 20_000 + passes + 2 * 20_000
    assert step_traffic(spilled).nvme_pass_bytes == passes
    assert step_traffic(spilled).pcie_up_bytes == passes
    halves = step_traffic(replace(spilled, splits_masters=True)).nvme_bytes
    assert halves - step_traffic(spilled).nvme_bytes == 2 * 20_000, "the update reads the upper halves"
    offload = inputs(3, optimizer_tier="cpu")
    assert (step_traffic(offload).pcie_up_bytes, step_traffic(offload).pcie_down_bytes) == (40_000, 40_000)
    assert step_traffic(replace(offload, splits_masters=True)).pcie_down_bytes == 80_000
    sums = step_traffic(replace(offload, moves_gradients=True, micro_steps=3))
    assert (sums.pcie_up_bytes, sums.pcie_down_bytes) == (40_000 + 2 * 40_000, 3 * 40_000)


def test_sums_of_gradients_in_host_memory() -> None:
    """Two tiles stay on the accelerator, and one unit's parts are on their way down in backward."""
    stays = inputs(2, optimizer_tier="cpu")
    moves = replace(stays, moves_gradients=True)
    shard = 20_000
    assert gpu_persistent(stays).grad_bytes == 2 * shard
    assert gpu_persistent(moves).grad_bytes == 2 * 2 * shard, "the tiles: each holds a whole small shard"
    large = replace(moves, trainable_numel=1 << 32)
    assert gpu_persistent(large).grad_bytes == 2 * 2 * (1 << 24)
    assert (host_bytes(moves).grad_bytes, host_bytes(stays).grad_bytes) == (2 * shard, 3 * 2 * shard)
    more = gpu_transient(moves).backward_bytes - gpu_transient(stays).backward_bytes
    assert more == moves.reduce_bytes * moves.largest_unit_numel
    part = Offloaded(states=(12_000,))
    assert gpu_persistent(replace(moves, offloaded=part)).grad_bytes == 2 * (shard - 12_000) + 2 * 2 * 12_000
    stateless = replace(moves, optimizer_bytes=0)
    assert gpu_persistent(stateless).grad_bytes == 2 * shard, "without states nothing is updated on the host"


def test_secondary_shards() -> None:
    second = inputs(3, hpz_ranks=2)
    whole = second.root_numel + second.frozen_root_numel
    sharded = second.trainable_numel + second.frozen_numel - whole
    assert gpu_persistent(second).secondary_bytes == 2 * sharded // 2
    assert gpu_persistent(inputs(3)).secondary_bytes == 0


def test_padding() -> None:
    assert padded_numel(1, 2) == 4_096
    assert padded_numel(4_096, 2) == 4_096
    assert padded_numel(4_097, 2) == 8_192
    assert padded_numel(0, 2) == 0
    assert padded_numel(10, 3, align=1) == 12


def test_contradictions_are_refused() -> None:
    for wrong, words in (
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"stage": 2, "param_tier": "cpu"}, "take stage 3"),
    ):
        with pytest.raises(ValueError, match=words):
            inputs(**{"stage": 3, **wrong})  # type: ignore[arg-type]
