"""Gradients that leave an accelerator during backward: no bit changes, and none of them stays there.

The accelerator is the CPU, which the engine takes for one with a memory of its own (`host_sums.is_host`);
the streams alone are missing then. On a GPU, sums that leave are compared with sums that stay.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.device import DEVICE
from tests.support.gradient_scripts import SCRIPTS, WIDTH, put_off, seen_by, started
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import BF16
from zerotrain.contract.memory import gpu_persistent, host_bytes, memory_inputs
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.offload import host_sums
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


STEPS = 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16 states": {"bf16": {"enabled": True, **BF16["bf16 states"]}},
    "fp32": {"bf16": {"enabled": False}},
    "fp16": {
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1},
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training; `clip` 0 does not clip."""

    stage: int
    tier: str = "cpu"
    accumulation: int = 1
    precision: str = "bf16"
    clip: float = 0.01
    ratio: float = 1.0
    just_in_time: bool = False
    tile: int = 1 << 24

    def config(self, folder: str) -> dict[str, Any]:
        block: dict[str, Any] = {"device": self.tier, "just_in_time": self.just_in_time, "ratio": self.ratio}
        if self.tier == "nvme":
            block["nvme_path"] = folder
        return {
            **PRECISIONS[self.precision],
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 100,
                "offload_optimizer": block,
            },
        }


CASES = (
    *(
        Case(stage=stage, tier=tier, accumulation=accumulation)
        for stage, tier, accumulation in product((1, 2, 3), ("cpu", "nvme"), (1, 3))
    ),
    *(
        Case(stage=stage, accumulation=accumulation, precision=precision)
        for stage, accumulation, precision in product((1, 2, 3), (1, 3), ("fp16", "fp32", "bf16 states"))
    ),
    *(
        Case(stage=stage, accumulation=accumulation, just_in_time=True)
        for stage, accumulation in product((2, 3), (1, 3))
    ),
    Case(stage=0),
    Case(stage=2, ratio=0.5),
    Case(stage=3, clip=0.0, accumulation=3),
)


def digest_of(engine: Engine) -> str:
    """Return a digest of every bit of this rank's masters, states and weights."""
    found = hashlib.sha256()
    for key, stream in sorted(engine.checkpoint_state().streams.items()):
        found.update(repr(key).encode() + stream.read(0, stream.numel).float().cpu().numpy().tobytes())
    return found.hexdigest()


def train(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engine = started(**case.config(folder))
        seen = []
        for step in range(STEPS * case.accumulation):
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + engine.rank))
            loss = engine(rows)
            engine.backward(loss)
            result = engine.step()
            seen.append((loss.item(), result.grad_norm, result.skipped))
        found: dict[str, Any] = {
            "seen": repr(seen),
            "digest": digest_of(engine),
            "skipped": [each[2] for each in seen],
        }
        inputs = memory_inputs(engine.config, unit_sizes(engine.core.layout), on_host=False)
        found["grads"] = engine.memory.live_bytes(MemoryKind.GRADS), gpu_persistent(inputs).grad_bytes
        found["host"] = engine.memory.live_bytes(MemoryKind.HOST_GRADS), host_bytes(inputs).grad_bytes
        found["largest"] = max(unit.stop - unit.start for unit in engine.core.units)
        found["moves"] = inputs.moves_gradients
        engine.close()
        return found


def train_all(cases: tuple[Case, ...], is_apart: bool) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        host_sums.is_host = lambda device: not is_apart
        host_sums.tile_numel = case.tile
        found.append(train(case))
    return found


@pytest.mark.parametrize("ranks", with_slow_rows([1, 2], quick=[2]))
def test_no_bit_changes_and_the_bytes_are_those_of_the_formulas(ranks: int) -> None:
    apart, plain = run_ranks(ranks, train_all, CASES, True), run_ranks(ranks, train_all, CASES, False)
    for mine, theirs in zip(apart, plain, strict=True):
        for case, found, wanted in zip(CASES, mine, theirs, strict=True):
            assert found["seen"] == wanted["seen"], case
            assert found["digest"] == wanted["digest"], case
            is_whole = case.stage == 0 or (
                case.stage == 1 and (case.accumulation > 1 or case.precision == "fp32")
            )
            assert found["moves"] is not is_whole, case
            assert found["grads"][0] == found["grads"][1], case
            if not is_whole:
                assert found["host"][0] == found["host"][1] > 0, case
                kept = wanted["grads"][0] - found["host"][0]
                width = 2 if case.precision == "bf16 states" else 4
                assert found["grads"][0] == kept + 2 * width * found["largest"], "two tiles"
            assert wanted["host"][0] == 0 or DEVICE == "cuda", case
            if case.precision == "fp16":
                assert set(found["skipped"]) == {True, False}, case


TILED = tuple(
    Case(stage=stage, accumulation=accumulation, clip=0.0, tile=tile)
    for stage, accumulation, tile in product((2, 3), (1, 3), (1000, 2048))
)


def test_tiles_of_any_size_change_no_bit_of_the_sums() -> None:
    """Squares are added tile by tile, so norms may differ in the last digits."""
    for ranks in (1, 2):
        tiled, plain = (
            run_ranks(ranks, train_all, TILED, True)[0],
            run_ranks(ranks, train_all, TILED, False)[0],
        )
        for case, found, wanted in zip(TILED, tiled, plain, strict=True):
            assert found["digest"] == wanted["digest"], case
            pairs = zip(eval_numbers(found["seen"]), eval_numbers(wanted["seen"]), strict=True)
            assert all(one == pytest.approx(other, rel=1e-12) for one, other in pairs), case


def eval_numbers(text: str) -> list[float]:
    return [
        float(word) for word in text.translate(str.maketrans("[](),", "     ")).split() if word[0].isdigit()
    ]


def run_scripts(is_apart: bool) -> list[tuple[str, list[float]]]:
    """Run every script at every stage that it is made for; return its name and the numbers that it saw."""
    host_sums.is_host = lambda device: not is_apart
    found: list[tuple[str, list[float]]] = []
    for stage, script in product((1, 2, 3), SCRIPTS):
        if stage > 1 and script is put_off:
            continue  # it uses `no_sync`
        offload = {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        }
        engine = started(zero_optimization=offload)
        found.append((f"stage {stage}, {script.__name__}", flat(seen_by(script, engine))))
        engine.close()
    return found


def flat(values: Any) -> list[float]:
    return [number for each in values for number in flat(each)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("ranks", with_slow_rows([1, 2], quick=[2]))
def test_what_scripts_do_with_gradients_changes_no_bit(ranks: int) -> None:
    for mine, theirs in zip(
        run_ranks(ranks, run_scripts, True), run_ranks(ranks, run_scripts, False), strict=True
    ):
        for (what, found), (_, wanted) in zip(mine, theirs, strict=True):
            # What a script wrote is squared on the host, and on a GPU by a kernel, in another order.
            assert found == (wanted if DEVICE == "cpu" else pytest.approx(wanted, rel=1e-5)), what
