"""Stage 1 with one micro-batch per step keeps a rank's own part of the gradients: the bits of whole sums."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gradient_scripts import (
    SCRIPTS,
    Script,
    accumulating,
    plain,
    put_off,
    seen_by,
    started,
    twice,
)
from tests.support.ranks import run_ranks
from zerotrain.runtime import setup
from zerotrain.runtime.zero import gradient_sum
from zerotrain.runtime.zero.ledger import MemoryKind

pytestmark = pytest.mark.ranks


MORE: tuple[dict[str, Any], ...] = (
    {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
    # Without overlap whole sums of two passes are sent at once, in fp16, and rounded to it.
    {
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    {"bf16": {"enabled": False}},
)


def outcome(script: Script, more: dict[str, Any], *, is_whole: bool) -> list[Any]:
    if is_whole:
        vars(setup)["keeps_own_gradients"] = lambda config: config.zero.stage > 1
    gradient_sum.stays = lambda device: True  # also between steps, when they are counted here
    engine = started(**more)
    kept = engine.memory.live_bytes(MemoryKind.GRADS)
    seen = seen_by(script, engine)
    after = engine.memory.live_bytes(MemoryKind.GRADS)
    engine.close()
    return [(kept, after), seen]


def outcomes(is_whole: bool) -> list[list[Any]]:
    runs: list[tuple[Script, dict[str, Any]]] = [
        *((script, {}) for script in SCRIPTS),
        *((script, more) for more in MORE for script in (plain, twice)),
    ]
    return [outcome(script, more, is_whole=is_whole) for script, more in runs]


def test_a_part_of_the_sums_gives_the_bits_of_whole_ones() -> None:
    parts, wholes = run_ranks(2, outcomes, False), run_ranks(2, outcomes, True)
    for part, whole in zip(parts, wholes, strict=True):
        for index, ((bytes_of_part, mine), (bytes_of_whole, theirs)) in enumerate(
            zip(part, whole, strict=True)
        ):
            assert repr(mine) == repr(theirs), index  # a norm may be NaN
            assert bytes_of_whole[0] == bytes_of_whole[1], index
            # Whole sums are made when a script needs them: where the boundary is put off, and accumulated.
            narrow = index < 15  # in fp32 autograd writes into the sums themselves
            assert bytes_of_part[0] == bytes_of_whole[0] // (2 if narrow else 1), index
            grows = index in (SCRIPTS.index(put_off), SCRIPTS.index(accumulating))
            assert bytes_of_part[1] == bytes_of_whole[1] // (1 if grows or not narrow else 2), index
