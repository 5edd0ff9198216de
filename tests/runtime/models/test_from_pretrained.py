"""`from_pretrained` of transformers under stage 3 gives the library's own values, each rank reading its
share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain.runtime as zt
from tests.support import hf_families
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import world
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.weights.files import WeightFiles

pytestmark = pytest.mark.ranks

NAMES = list(hf_families.FAMILIES)
FUSED = {"mixtral", "qwen3 moe"}
READ_EARLY = {"bert masked": 96, "distilbert": 96, "wav2vec2": 2 * 8224}
"""Elements that the library itself reads while it loads: a bias that it pads, a weight norm."""


class Reads:
    """Elements that this process read from files."""

    def __init__(self) -> None:
        self.count = 0
        original = WeightFiles.read_into

        def read_into(files: WeightFiles, name: str, start: int, target: torch.Tensor) -> None:
            self.count += target.numel()
            original(files, name, start, target)

        setattr(WeightFiles, "read_into", read_into)  # noqa: B010


def ties(model: Any) -> list[list[str]]:
    """Return the names of each parameter."""
    named = list(model.named_parameters(remove_duplicate=False))
    return [[name for name, other in named if other is each] for each in model.parameters()]


def loaded(families: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Return what a rank finds when it loads each family and makes an engine of it."""
    _, world_size = world()
    hf_families.use_stage_3()
    reads = Reads()
    return {family: one_loaded(family, f"{folder}/{family}", reads, world_size) for family in families}


def one_loaded(family: str, path: str, reads: Reads, world_size: int) -> dict[str, Any]:
    auto = hf_families.class_of(family)
    plain = auto.from_pretrained(path)
    reads.count = 0
    with hf_families.stage_3(world_size):
        model = auto.from_pretrained(path)
        early = reads.count
        found = {"ties": ties(model) == ties(plain), "training": model.training, "early": early}
        found["pending"] = all(is_pending(each) for each in model.parameters())
        engine, *_ = zt.initialize(model=model, config=hf_families.config(world_size))
    found["read"] = reads.count - early
    found["numel"] = sum(each.numel() for each in plain.parameters())
    found["differing"] = hf_families.differing(plain.state_dict(), engine.module_state_dict())
    found["buffers"] = hf_families.differing(dict(plain.named_buffers()), dict(model.named_buffers()))
    engine.close()
    return found


@pytest.mark.parametrize("part", with_slow_rows([0, 1, 2], quick=[1]))
def test_values_equal_the_librarys_and_every_byte_is_read_once(part: int, tmp_path: Path) -> None:
    families = NAMES[part::3]
    for family in families:
        hf_families.save(family, tmp_path / family)
    reports = run_ranks(2, loaded, families, str(tmp_path))
    for family in families:
        for report in (each[family] for each in reports):
            assert report["differing"] == report["buffers"] == [], family
            assert report["ties"], family
            assert not report["training"], family
            assert report["pending"] or family in READ_EARLY, family
            assert report["early"] == READ_EARLY.get(family, 0), family
            assert report["read"] < report["numel"] * 0.75, family
        read = sum(report[family]["read"] for report in reports)
        assert abs(read - reports[0][family]["numel"]) <= 2 * READ_EARLY.get(family, 0), family
