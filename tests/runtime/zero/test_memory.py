"""The engine's memory equals the contract's byte formulas: counters exactly, resident memory within 5 %."""

from __future__ import annotations

import gc
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.device import DEVICE, worlds
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.tiny_models import token_batches
from tests.support.training import BF16, GLOBAL_BATCH, Case, micro_batches, world
from zerotrain.contract.memory import UnitSize, gpu_persistent, gpu_transient, memory_inputs, step_traffic
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero import gradient_sum
from zerotrain.runtime.zero.buffer import return_free_memory
from zerotrain.runtime.zero.layout import Segment
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


STEP_RECORD_BYTES = 64

CASES = tuple(
    Case(stage=stage, dtype=dtype, tied=tied, accumulation=2)
    for stage, dtype, tied in product((0, 1, 2, 3), ("fp32", "bf16", "bf16 states"), (False, True))
)


def is_hidden(part: Segment) -> bool:
    """Return whether Muon updates this parameter of `TinyGPT`."""
    return len(part.shape) == 2 and part.fqn.startswith("blocks.")


def unit_sizes(engine: Engine) -> list[UnitSize]:
    return [
        UnitSize(
            name=unit.name,
            numel=unit.numel,
            padded_numel=unit.padded_numel,
            trainable=unit.trainable,
            whole_pass=unit.module == "",
            matrix_numel=sum(part.numel for part in unit.segments if is_hidden(part)),
            stays_whole=unit.stays_whole,
        )
        for unit in engine.core.layout.units
    ]


def measure(case: Case) -> dict[str, Any]:
    """Return persistent bytes by kind, the peak of the rest over two steps, and the bytes sent in the second.

    The results of the formulas are returned beside them.
    """
    rank, world_size = world()
    gradient_sum.stays = lambda device: True  # also between steps, when they are counted here
    engine, *_ = zt.initialize(model=case.model(), config=case.config(world_size))
    inputs = memory_inputs(engine.config, unit_sizes(engine), shares_memory=engine.comm.shares_memory)
    peak_transient = sent = 0
    for batch in token_batches(2, size=GLOBAL_BATCH):
        before = engine.comm.bytes_sent.total()
        for parts in micro_batches(batch, world_size=world_size, accumulation=case.accumulation):
            engine.memory.reset_peak()
            engine.backward(engine(*parts[rank]))
            engine.step()
            peak_transient = max(peak_transient, engine.memory.peak_bytes() - engine.memory.persistent_bytes)
        sent = engine.comm.bytes_sent.total() - before
    memory, expected = engine.memory, gpu_persistent(inputs)
    engine.close()
    return {
        "params": (memory.live_bytes(MemoryKind.PARAMS), expected.param_bytes + expected.replicated_bytes),
        "grads": (memory.live_bytes(MemoryKind.GRADS), expected.grad_bytes),
        "states": (memory.live_bytes(MemoryKind.STATES), expected.optimizer_bytes),
        "transient": (peak_transient, gpu_transient(inputs).peak_bytes),
        "left": memory.transient_bytes,
        "sent": (sent - (world_size - 1) * STEP_RECORD_BYTES, step_traffic(inputs).network_bytes),
    }


def measure_all(cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    return [measure(case) for case in cases]


SIZES = with_slow_rows(worlds(1, 2, 4), quick=worlds(1, 2))


@cache
def measured(world_size: int, _transport: str) -> list[dict[str, Any]]:
    """Return rank 0's results of every case."""
    found: list[dict[str, Any]] = run_ranks(world_size, measure_all, CASES)[0]
    return found


@pytest.mark.parametrize(("world_size", "each_transport"), SIZES, indirect=["each_transport"])
def test_counters_equal_the_formulas(world_size: int, each_transport: str) -> None:
    for case, counted in zip(CASES, measured(world_size, each_transport), strict=True):
        for kind in ("params", "grads", "states"):
            engine_bytes, formula_bytes = counted[kind]
            assert engine_bytes == formula_bytes, f"{case}: {kind}"
        peak, bound = counted["transient"]
        assert peak <= bound, f"{case}: transients"
        assert peak >= 0.8 * bound, f"{case}: the formula promises far more than is used"
        assert counted["left"] == 0, f"{case}: something stayed gathered between steps"


@pytest.mark.parametrize(("world_size", "each_transport"), SIZES, indirect=["each_transport"])
def test_wire_bytes_equal_the_formula(world_size: int, each_transport: str) -> None:
    """A rank sends (N - 1) / N of the payload: its part of everything to all other ranks."""
    for case, counted in zip(CASES, measured(world_size, each_transport), strict=True):
        sent, payload = counted["sent"]
        assert sent == payload * (world_size - 1) // world_size, case


def wire_of_a_frozen_body(stage: int, accumulation: int) -> tuple[int, int]:
    """Return (bytes sent in a step, payload by the formula) of blocks whose matrices are frozen."""
    rank, world_size = world()
    case = Case(stage=stage, dtype="bf16", accumulation=accumulation)
    model = case.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or not name.startswith("blocks."))
    engine, *_ = zt.initialize(model=model, config=case.config(world_size))
    inputs = memory_inputs(engine.config, unit_sizes(engine), shares_memory=engine.comm.shares_memory)
    sent = 0
    for batch in token_batches(2, size=GLOBAL_BATCH):
        before = engine.comm.bytes_sent.total()
        for parts in micro_batches(batch, world_size=world_size, accumulation=accumulation):
            engine.backward(engine(*parts[rank]))
            engine.step()
        sent = engine.comm.bytes_sent.total() - before
    assert inputs.frozen_numel > inputs.frozen_root_numel
    engine.close()
    return sent - (world_size - 1) * STEP_RECORD_BYTES, step_traffic(inputs).network_bytes


def frozen_bodies() -> list[tuple[int, int]]:
    return [wire_of_a_frozen_body(stage, micro) for stage in (2, 3) for micro in (1, 2)]


def test_frozen_weights_are_gathered_and_not_reduced(each_transport: str) -> None:
    for sent, payload in run_ranks(2, frozen_bodies)[0]:
        assert sent == payload // 2


FEATURES: dict[str, dict[str, Any]] = {
    # name: entries over those of `plain`; optimizer parameters beyond the rate come with the type
    "fp16": {"fp16": {"enabled": True, "loss_scale": 4.0}},
    "Lamb": {"optimizer": {"type": "Lamb"}, "bf16": {"enabled": True}},
    "Muon": {"optimizer": {"type": "Muon"}, "bf16": {"enabled": True}},
    "Muon in fp32": {"optimizer": {"type": "Muon"}},
    "Lion": {"optimizer": {"type": "Lion"}, "bf16": {"enabled": True}},
    "Adagrad": {"optimizer": {"type": "Adagrad"}},
    "AMSGrad": {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "bf16": {"enabled": True}},
    "SGD without momentum": {"optimizer": {"type": "SGD"}},
    "bf16 masters": {"bf16": {"enabled": True, **BF16["bf16 masters"]}},
    "bf16 states": {"bf16": {"enabled": True, **BF16["bf16 states"]}},
    "bf16 states of Lion": {"optimizer": {"type": "Lion"}, "bf16": {"enabled": True, **BF16["bf16 states"]}},
    "bf16 on the wire": {"communication_data_type": "bf16"},
    "bf16 of fp32 sums on the wire": {"communication_data_type": "bf16", "bf16": {"enabled": True}},
    "no overlap": {"zero": {"overlap_comm": False}},
    "overlap": {"zero": {"overlap_comm": True}},
    "no prefetch": {"zero": {"stage3_prefetch_bucket_size": 0}},
    "few live parameters": {"zero": {"stage3_max_live_parameters": 1}, "bf16": {"enabled": True}},
    "small ones whole": {"zero": {"stage3_param_persistence_threshold": 2_000}},
    "small ones whole within a budget": {
        "zero": {"stage3_param_persistence_threshold": 100_000, "stage3_model_persistence_threshold": 3_000}
    },
}


def of_feature(name: str, stage: int) -> dict[str, Any]:
    entries = dict(FEATURES[name])
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **entries.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **entries}


def by_phase(name: str, stage: int) -> dict[str, tuple[int, int]]:
    """Return (bytes counted, bytes by the formula): what stays, and the peak of the rest in each phase."""
    gradient_sum.stays = lambda device: True  # also between steps, when they are counted here
    engine, *_ = zt.initialize(model=Case().model(), config=of_feature(name, stage))
    batches = token_batches(3, size=2)
    for batch in batches[:-1]:
        engine.backward(engine(*batch))
        engine.step()
    inputs = memory_inputs(engine.config, unit_sizes(engine), shares_memory=engine.comm.shares_memory)
    kept = engine.memory.persistent_bytes
    engine.memory.enter("between")
    engine.memory.reset_peak()
    engine.backward(engine(*batches[-1]))
    engine.step()
    peaks = {phase: peak - kept for phase, peak in engine.memory.phase_peaks().items()}
    bounds = gpu_transient(inputs)
    found = {"kept": (engine.memory.persistent_bytes, gpu_persistent(inputs).total_bytes)}
    for phase in ("forward", "backward", "step"):
        found[phase] = (peaks[phase], getattr(bounds, f"{phase}_bytes"))
    assert engine.memory.transient_bytes == 0
    engine.close()
    return found


def every_feature() -> list[tuple[str, int, dict[str, tuple[int, int]]]]:
    return [(name, stage, by_phase(name, stage)) for name in FEATURES for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("world_size", "each_transport"),
    with_slow_rows(worlds(1, 2), quick=worlds(1) + worlds(2)[:1]),
    indirect=["each_transport"],
)
@pytest.mark.usefixtures("each_transport")
def test_every_feature_keeps_the_formulas_in_every_phase(world_size: int) -> None:
    for ranks in zip(*run_ranks(world_size, every_feature), strict=True):
        largest = most = 0
        for name, stage, phases in ranks:
            kept, formula = phases.pop("kept")
            assert kept == formula, f"{name}, stage {stage}: kept between steps"
            for phase, (peak, bound) in phases.items():
                assert peak <= bound, f"{name}, stage {stage}: {phase}"
                largest, most = max(largest, peak), max(most, bound)
        # A phase hands its data in flight to the next one, and Muon's parts of matrices differ between ranks,
        # so the formula bounds the largest peak.
        assert largest >= 0.8 * most, f"{name}, stage {stage}"


class Stack(nn.Module):
    """A model of 8.4 million parameters in 32 units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return hidden


def resident_bytes() -> int:
    """Return this process's memory in RAM that belongs to no file, without malloc's free memory."""
    gc.collect()
    return_free_memory()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    # Memory that several processes map counts in parts: weights and gradients that ranks read in place.
    kinds = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_")}
    return kinds["Pss_Anon:"] + kinds["Pss_Shmem:"]


def resident(case: Case) -> tuple[int, int]:
    """Return (growth of resident memory over an earlier small engine, bytes by the counters)."""
    _, world_size = world()
    warm, *_ = zt.initialize(model=nn.Linear(512, 512), config=case.config(world_size))
    values = torch.randn(2, 512).to(next(warm.module.parameters()).dtype)
    warm.backward(warm(values).float().square().mean())
    warm.step()
    before = resident_bytes()
    engine, *_ = zt.initialize(model=Stack(), config=case.config(world_size))
    for _ in range(2):
        engine.backward(engine(values).float().square().mean())
        engine.step()
    engine.comm.gather_record([0.0])
    grown = resident_bytes() - before
    engine.comm.gather_record([grown])  # pages are shared: the other ranks must still exist
    # Shared memory keeps what it lent before for the next loan.
    idle = sum(slot.data.nbytes for slot in getattr(engine.comm.memory, "_slots", ()) if not slot.is_lent)
    return grown, engine.memory.persistent_bytes + idle


@pytest.mark.skipif(DEVICE == "cuda", reason="the engine's memory is the GPU's: offload/test_gpu_memory.py")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resident_memory_is_what_the_counters_say(stage: int) -> None:
    for grown, counted in run_ranks(2, resident, Case(stage=stage)):
        assert counted > 60e6
        assert abs(grown - counted) <= 0.05 * counted, (
            f"{grown / 1e6:.1f} MB grown, {counted / 1e6:.1f} counted"
        )
