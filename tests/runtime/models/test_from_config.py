"""`from_config` of transformers under stage 3 gives the library's own random values, and no memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import hf_families
from tests.support.ranks import run_ranks
from zerotrain.runtime.construct.pending import is_pending
from zerotrain.runtime.models.from_pretrained import _refuse
from zerotrain.runtime.weights import WeightsError

NAMES = list(hf_families.FAMILIES)


def built() -> dict[str, list[str]]:
    """Return, per family, what differs from the library's model."""
    hf_families.use_stage_3()
    return {family: one_built(family) for family in NAMES}


def one_built(family: str) -> list[str]:
    settings, auto = hf_families.config_of(family), hf_families.class_of(family)
    torch.manual_seed(4)
    plain, following = auto.from_config(settings), torch.rand(3)
    with hf_families.stage_3(1):
        torch.manual_seed(4)
        model, after = auto.from_config(settings), torch.rand(3)
    found = [] if torch.equal(following, after) else ["random numbers afterwards"]
    found += ["in memory"] * (sum(map(is_pending, model.parameters())) < len(list(model.parameters())) - 1)
    found += hf_families.differing(plain.state_dict(), model.state_dict())
    return found + hf_families.differing(dict(plain.named_buffers()), dict(model.named_buffers()))


@pytest.mark.ranks
def test_values_and_random_numbers_equal_the_librarys() -> None:
    (found,) = run_ranks(1, built)
    assert {family: each for family, each in found.items() if each} == {}


def refused(folder: str) -> dict[str, str]:
    hf_families.use_stage_3()
    auto = hf_families.class_of("llama")
    found: dict[str, str] = {}
    calls: dict[str, dict[str, Any]] = {"pickled": {}, "device map": {"device_map": "cpu"}}
    with hf_families.stage_3(1):
        for name, options in calls.items():
            try:
                auto.from_pretrained(folder, **options)
            except ValueError as error:
                found[name] = str(error)
    found["plain"] = type(auto.from_pretrained(folder).lm_head.weight).__name__
    return found


@pytest.mark.ranks
def test_what_cannot_be_read_by_ranges_is_refused(tmp_path: Path) -> None:
    hf_families.save("llama", tmp_path, max_shard_size="1GB")
    from safetensors.torch import load_file

    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    (found,) = run_ranks(1, refused, str(tmp_path))
    assert "pytorch_model.bin are pickled" in found["pickled"]
    assert "Convert once" in found["pickled"]
    assert "not compatible" in found["device map"]
    assert found["plain"] == nn.Parameter.__name__, "without stage 3 the library does as it always does"


@pytest.mark.unit
def test_quantized_weights_are_refused() -> None:
    with pytest.raises(WeightsError, match="quantized weights cannot be partitioned"):
        _refuse(["model.safetensors"], SimpleNamespace(hf_quantizer=object()))
