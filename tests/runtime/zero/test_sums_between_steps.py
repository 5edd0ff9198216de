"""Sums of a rank's own part of the gradients, which an accelerator frees between the update and the next
reduction: the memory is free meanwhile, and no bit of the result changes.

A CPU keeps them, so the tests tell the engine not to.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import TinyGPT, token_batches
from tests.support.training import Case, Outcome, largest_difference, train_with_engine
from zerotrain.contract.memory import freed_sums, memory_inputs
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.zero import gradient_sum
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


CASES = (
    *(
        Case(stage=stage, dtype=dtype, accumulation=accumulation, clip=0.5, steps=2)
        for stage, dtype, accumulation in product((2, 3), ("fp32", "bf16"), (1, 2))
    ),
    *(Case(stage=1, dtype="bf16", accumulation=accumulation, steps=2) for accumulation in (1, 2)),
    Case(stage=2, dtype="bf16 masters", steps=2, extra={"zero_quantized_gradients": True}),
    Case(stage=2, steps=2, extra={"overlap_comm": False}),
    Case(stage=3, steps=2, tied=True, checkpointing="saved", extra={"offload_param": {"device": "cpu"}}),
    Case(stage=3, steps=2, extra={"offload_optimizer": {"device": "cpu"}}),
    *(Case(stage=2, steps=2, optimizer=kind) for kind in ("Lamb", "Muon")),
)


def free_sums(*, frees: bool = True) -> None:
    gradient_sum.stays = lambda device: not frees


def train_all(frees: bool) -> list[Outcome]:
    free_sums(frees=frees)
    return [train_with_engine(case) for case in CASES]


def test_freed_sums_change_no_bit() -> None:
    found, wanted = run_ranks(2, train_all, True)[1], run_ranks(2, train_all, False)[1]
    for case, one, other in zip(CASES, found, wanted, strict=True):
        assert one.losses == other.losses, case
        assert one.norms == other.norms, case
        assert largest_difference(one, other) == 0.0, case


def make_engine(stage: int, accumulation: int = 1) -> Engine:
    case = Case(stage=stage, dtype="bf16", accumulation=accumulation)
    return zt.initialize(model=case.model(), config=case.config(2))[0]


def sums_in_a_step(case: Case) -> dict[str, int]:
    """Return the bytes of sums that exist at points of the second step, and those that the formulas free."""
    free_sums()
    engine = make_engine(case.stage, case.accumulation)
    found = {}
    for batch in token_batches(2, size=2):
        for micro in range(case.accumulation):
            found[f"forward {micro}"] = engine.memory.live_bytes(MemoryKind.GRADS)
            engine.backward(engine(*batch))
            found[f"backward {micro}"] = engine.memory.live_bytes(MemoryKind.GRADS)
            engine.step()
    found["after"] = engine.memory.live_bytes(MemoryKind.GRADS)
    found["formula"] = freed_sums(memory_inputs(engine.config, unit_sizes(engine.core.layout))).total_bytes
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sums_exist_from_backward_to_the_update(stage: int) -> None:
    for found in run_ranks(2, sums_in_a_step, Case(stage=stage)):
        assert found["backward 0"] == found["formula"] > 0
        assert found["forward 0"] == found["after"] == 0


def test_sums_stay_between_micro_batches() -> None:
    for found in run_ranks(2, sums_in_a_step, Case(stage=2, accumulation=2)):
        assert found["forward 0"] == found["after"] == 0
        assert found["forward 1"] == found["backward 0"] == found["formula"] > 0


def gradients_by_hand() -> list[torch.Tensor]:
    """Write, read and drop gradients outside of a backward pass; return what the last step was made of."""
    engine = make_engine(2)
    model = engine.module
    assert isinstance(model, TinyGPT)
    (first, *_), batch = model.parameters(), token_batches(1, size=2)[0]
    engine.backward(engine(*batch))
    kept = zt.get_local_grad(first)  # read after the sums are freed
    engine.zero_grad()
    engine.backward(engine(*batch))
    zt.set_full_grad(first, torch.ones_like(zt.get_full_grad(first)))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    engine.step()
    engine.step()  # of nothing
    master = zt.get_full_fp32(first).clone()
    engine.close()
    return [kept.clone(), torch.tensor(norm), master]


def both_ways() -> list[list[Any]]:
    free_sums()
    freed = gradients_by_hand()
    free_sums(frees=False)
    return [[value.tolist() for value in values] for values in (freed, gradients_by_hand())]


def test_gradients_by_hand_are_the_same() -> None:
    for freed, kept in run_ranks(2, both_ways):
        assert freed == kept


def held_back() -> list[str]:
    """Return the streams for which memory of sums was held back, after updates on their stream and on
    another one."""
    free_sums()
    current, held = "main", list[str]()
    module: Any = gradient_sum
    module.ComputeStream.current = lambda device: current
    module.keep_for_current = lambda tensor: held.append(current)
    engine = make_engine(2)
    sums = next(iter(engine.core.gradients.values())).sum
    for current in ("main", "side"):
        sums.prepare()
        current = "main"
        sums.close()
    return held


def test_memory_of_another_stream_is_held_back() -> None:
    """A module on a stream of the script's own has its sums allocated there; the update reads them on another
    one."""
    assert run_ranks(2, held_back) == [["main"], ["main"]]
