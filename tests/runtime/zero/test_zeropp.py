"""ZeRO++ on two simulated nodes of two ranks.

hpZ changes no bit, quantised runs still converge, and the bytes that cross nodes equal the formulas.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import GLOBAL_BATCH, Case, Outcome, micro_batches, train_with_engine, world
from zerotrain.contract.memory import UnitSize, gpu_persistent, gpu_transient, memory_inputs, step_traffic
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero import gradient_sum
from zerotrain.runtime.zero.ledger import MemoryKind
from zerotrain.runtime.zero.quantize import BLOCK_NUMEL, INT4, INT8, Quantizer

pytestmark = pytest.mark.ranks


NODES, RANKS_PER_NODE = 2, 2
HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
ON_NODES = {"stage3_max_reuse_distance": 0}
"""Settings that gather for forward and for backward, as large models do."""


def on_two_nodes(case: Case, **changes: Any) -> Outcome:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    return train_with_engine(replace(case, **changes))


def train_pair(cases: list[Case]) -> list[tuple[bool, bool]]:
    """Return, per case, whether hpZ gives the same losses and parameters as without."""
    same = []
    for case in cases:
        plain = on_two_nodes(case, extra=ON_NODES)
        second = on_two_nodes(case, extra={**ON_NODES, **HPZ})
        pairs = zip(plain.parameters.values(), second.parameters.values(), strict=True)
        same.append((plain.losses == second.losses, all((a == b).all() for a, b in pairs)))
    return same


def test_hpz_changes_no_bit() -> None:
    cases = [
        Case(stage=3, dtype="bf16", accumulation=2),
        Case(stage=3, dtype="fp32", tied=True, clip=0.3),
        Case(stage=3, dtype="bf16", checkpointing="reentrant"),
    ]
    for same in run_ranks(4, train_pair, cases):
        assert same == [(True, True)] * len(cases)


def write_between_steps(extra: dict[str, Any], folder: str) -> bytes:
    """Weights that the caller writes, and a loaded state, must reach the second copies as well."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    rank, world_size = world()
    case = Case(stage=3, dtype="bf16", extra={**ON_NODES, **extra})
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    batches = token_batches(3, size=GLOBAL_BATCH)
    losses = []
    for number, batch in enumerate(batches):
        parts = micro_batches(batch, world_size=world_size, accumulation=1)[0]
        with torch.no_grad():
            losses.append(engine(*parts[rank]).item())  # makes the second copies
        if number == 1:
            with zt.full_parameters(engine.module, write=True), torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.mul_(1.5)
        loss = engine(*parts[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if number == 0:
            engine.save_checkpoint(folder)
    for _ in range(2):
        with torch.no_grad():
            losses.append(engine(*parts[rank]).item())
        engine.load_checkpoint(folder)
    assert losses[-1] != losses[-2], "the loaded weights were not used"
    engine.close()
    return repr(losses).encode()


def test_second_copies_are_dropped_when_weights_change(tmp_path: Path) -> None:
    expected = run_ranks(4, write_between_steps, {}, str(tmp_path / "plain"))
    assert run_ranks(4, write_between_steps, HPZ, str(tmp_path / "second")) == expected


def sizes(engine: Engine) -> list[UnitSize]:
    return [
        UnitSize(
            name=unit.name,
            numel=unit.numel,
            padded_numel=unit.padded_numel,
            trainable=unit.trainable,
            whole_pass=unit.module == "",
        )
        for unit in engine.core.layout.units
    ]


def account(extra: dict[str, Any]) -> dict[str, Any]:
    """Return bytes of one steady step that crossed nodes, and the size of the buffers."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    rank, world_size = world()
    gradient_sum.stays = lambda device: True  # also between steps, when they are counted here
    case = Case(stage=3, dtype="bf16", accumulation=2, extra={**ON_NODES, **extra})
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    inputs = memory_inputs(engine.config, sizes(engine), ranks_per_node=RANKS_PER_NODE)
    crossed, memory = 0, engine.memory
    peak = 0
    for batch in token_batches(2, size=GLOBAL_BATCH):
        before = engine.comm.cross_node_bytes.total()
        memory.reset_peak()
        for parts in micro_batches(batch, world_size=world_size, accumulation=2):
            engine.backward(engine(*parts[rank]))
            engine.step()
        crossed = engine.comm.cross_node_bytes.total() - before
        peak = memory.peak_bytes() - memory.persistent_bytes
    records = (NODES - 1) * 8 * len(_record_fields())
    found = {
        "crossed": crossed - records,
        "cross formula": step_traffic(inputs).cross_node_bytes,
        "psi": inputs.trainable_numel,
        "secondary": (memory.live_bytes(MemoryKind.SECONDARY), gpu_persistent(inputs).secondary_bytes),
        "grads": (memory.live_bytes(MemoryKind.GRADS), gpu_persistent(inputs).grad_bytes),
        "peak": (peak, gpu_transient(inputs).peak_bytes),
        "left": memory.transient_bytes,
    }
    engine.close()
    return found


def _record_fields() -> tuple[str, ...]:
    from zerotrain.runtime.step_record import StepRecord

    return tuple(StepRecord.__slots__)


def account_all(extras: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [account(extra) for extra in extras]


def test_cross_node_bytes_and_memory_equal_the_formulas() -> None:
    """A step has two micro-batches, with M = 2 bytes x parameters.

    Without ZeRO++ 6 M cross nodes. With all of it 0.5 M cross for the one gather, 2 x 0.25 M for the
    reductions, and 4 bytes per block of each.
    """
    extras = [{}, HPZ, QWZ, QGZ, {**HPZ, **QWZ, **QGZ}]
    ranks = run_ranks(4, account_all, extras)
    for index, extra in enumerate(extras):
        found = [per_rank[index] for per_rank in ranks]
        psi = found[0]["psi"]
        # A node sends its part of everything to the others.
        into_node = sum(one["crossed"] for one in found[:RANKS_PER_NODE]) * NODES // (NODES - 1)
        assert into_node == found[0]["cross formula"], extra
        scales = 4 * psi // BLOCK_NUMEL
        if not extra:
            assert into_node == 2 * 3 * (2 * psi)
        if extra == {**HPZ, **QWZ, **QGZ}:
            assert into_node == (psi + scales) + 2 * (psi // 2 + scales)
        for one in found:
            for kind in ("secondary", "grads"):
                counted, formula = one[kind]
                assert counted == formula, f"{extra}: {kind}"
            peak, bound = one["peak"]
            assert 0.8 * bound <= peak <= bound, f"{extra}: {peak} counted, {bound} by the formula"
            assert one["left"] == 0


def losses_of(extra: dict[str, Any]) -> list[float]:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    rank, world_size = world()
    case = Case(stage=3, dtype="bf16", extra=extra)
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    batch = token_batches(1, size=GLOBAL_BATCH)[0]
    parts = micro_batches(batch, world_size=world_size, accumulation=1)[0]
    losses = []
    for _ in range(25):
        loss = engine(*parts[rank])
        engine.backward(loss)
        engine.step()
        losses.append(sum(row[0] for row in engine.comm.gather_record([loss.item()])) / world_size)
    engine.close()
    return losses


def learn(extras: list[dict[str, Any]]) -> list[list[float]]:
    return [losses_of(extra) for extra in extras]


def test_quantised_training_learns_as_much() -> None:
    plain, *quantised = run_ranks(4, learn, [{}, QWZ, QGZ, {**HPZ, **QWZ, **QGZ}])[0]
    learned = plain[0] - plain[-1]
    assert learned > 0.3, "the run is too short to compare"
    for losses in quantised:
        assert losses != plain
        assert losses[0] == pytest.approx(plain[0], abs=0.02)
        assert losses[0] - losses[-1] > 0.9 * learned


def look_after_forward(extra: dict[str, Any]) -> list[bool]:
    """Return what `full_parameters` shows and writes back while units are kept from a forward pass."""
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    rank, world_size = world()
    case = Case(stage=3, extra={"stage3_max_reuse_distance": 1e9, **extra})
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    parts = micro_batches(token_batches(1, size=GLOBAL_BATCH)[0], world_size=world_size, accumulation=1)[0]
    engine.backward(engine(*parts[rank]))  # from the second pass on units are kept
    engine.step()
    members = dict(engine.module.named_parameters())
    masters = {name: zt.get_full_fp32(member) for name, member in members.items()}
    found = []
    for write in (False, True):
        loss = engine(*parts[rank])
        assert engine.memory.live_bytes(MemoryKind.GATHERED), "nothing was kept"
        with zt.full_parameters(engine.module, write=write):
            found.append(all(torch.equal(masters[name], member) for name, member in members.items()))
        found.append(all(torch.equal(masters[name], zt.get_full_fp32(members[name])) for name in members))
        engine.backward(loss)
        engine.zero_grad()
    engine.close()
    return found


def test_full_parameters_are_exact_after_a_quantised_forward() -> None:
    assert run_ranks(4, look_after_forward, {**HPZ, **QWZ}) == [[True] * 4] * 4


@pytest.mark.parametrize("quantizer", [INT8, INT4])
def test_codes_are_within_half_a_step(quantizer: Quantizer) -> None:
    torch.manual_seed(0)
    values = torch.randn(4 * BLOCK_NUMEL) * torch.logspace(-6, 6, 4).repeat_interleave(BLOCK_NUMEL)
    values[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = 0.0
    packed = torch.zeros(quantizer.packed_bytes(values.numel()), dtype=torch.uint8)
    assert packed.numel() == values.numel() * quantizer.bits // 8 + 4 * 4
    quantizer.pack(values, packed)
    back = torch.empty_like(values)
    quantizer.unpack(packed, back)
    step = values.view(4, -1).abs().amax(1, keepdim=True) / (2 ** (quantizer.bits - 1) - 1)
    assert ((back - values).view(4, -1).abs() <= 0.501 * step).all()
    assert not back[BLOCK_NUMEL : 2 * BLOCK_NUMEL].any()
    for wrong in (float("nan"), float("inf"), -float("inf")):
        values[5] = wrong
        quantizer.pack(values, packed)
        quantizer.unpack(packed, back)
        assert not back[:BLOCK_NUMEL].isfinite().any(), "an overflow must stay visible"
        assert back[BLOCK_NUMEL:].isfinite().all()


def test_a_group_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"zero_hpz_partition_size: must divide the 4 ranks of the job"):
        run_ranks(4, train_with_engine, Case(stage=3, extra={"zero_hpz_partition_size": 3}))
