"""`initialize`: configurations that it refuses, the loader it builds, and a package without torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zerotrain.runtime as zt
from tests.support.free_form import config
from tests.support.ranks import RankFailed, run_ranks
from tests.support.training import world
from zerotrain.contract.config import ConfigError, load, resolve
from zerotrain.runtime.setup import read_config
from zerotrain.runtime.zero.layout import LayoutError


@pytest.mark.unit
@pytest.mark.parametrize(
    ("entry", "path", "value"),
    [
        ({"amp": {"enabled": True}}, "amp", {"enabled": True}),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "mics_shard_size", 2),
        ({"tensor_parallel": {"tp_size": 8}}, "tensor_parallel", 8),
        ({"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3}}}, "optimizer.type", "OneBitLamb"),
    ],
)
def test_what_is_not_run_is_refused_with_its_path_and_value(
    entry: dict[str, Any], path: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        zt.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, **entry})
    assert path in caught.value.path
    assert caught.value.value == value
    assert caught.value.way_out


@pytest.mark.unit
def test_a_configuration_for_other_ranks_is_refused() -> None:
    resolved = resolve(load({"train_batch_size": 4}), world_size=4)
    with pytest.raises(ConfigError, match=r"world_size: .* the 1 ranks that run; got 4"):
        zt.initialize(model=nn.Linear(2, 2), config=resolved)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("facts", "hidden"),
    [
        ({"hidden_size": 64}, 64),
        ({"hidden_sizes": [16, 32]}, 32),
        ({"text_config": SimpleNamespace(hidden_size=8)}, 8),
    ],
)
def test_auto_takes_the_models_width(facts: dict[str, Any], hidden: int) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**facts)  # type: ignore[assignment]
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = read_config(
        {"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto")}}, world_size=1, model=model
    ).zero
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (
        hidden * hidden,
        int(0.9 * hidden * hidden),
        10 * hidden,
    )


@pytest.mark.unit
def test_models_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(LayoutError, match="'weight', 'bias': on the meta device"):
        zt.initialize(model=nn.Linear(2, 2, device="meta"), config=config(0))
    with pytest.raises(LayoutError, match="'weight' is lazy"):
        zt.initialize(model=nn.LazyLinear(2), config=config(0))


def loaded(num_samples: int) -> list[list[float]]:
    data = TensorDataset(torch.arange(num_samples, dtype=torch.float32))
    settings = {**config(1), "train_micro_batch_size_per_gpu": 2}
    _, _, loader, _ = zt.initialize(model=nn.Linear(1, 1), config=settings, training_data=data)
    assert loader is not None
    return [batch[0].tolist() for batch in loader]


@pytest.mark.ranks
def test_the_loader_gives_each_rank_its_part() -> None:
    per_rank = run_ranks(2, loaded, 12)
    assert [len(batches) for batches in per_rank] == [3, 3]
    assert sorted(value for batches in per_rank for batch in batches for value in batch) == list(range(12))


def different_models() -> list[float]:
    torch.manual_seed(world()[0])
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.full((2,), float(world()[0])))
    zt.initialize(model=model, config=config(3))
    with zt.full_parameters(model):
        return [*model.weight.flatten().tolist(), *model.get_buffer("seen").tolist()]


@pytest.mark.ranks
def test_rank_0s_values_are_used_everywhere() -> None:
    first, second = run_ranks(2, different_models)
    assert first == second


def other_model() -> None:
    zt.initialize(model=nn.Linear(4, 4 + world()[0]), config=config(3))


@pytest.mark.ranks
def test_models_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[1\] built another model than rank 0"):
        run_ranks(2, other_model)


@pytest.mark.unit
def test_public_names_load_and_nothing_else() -> None:
    assert sorted(zt.__all__) == zt.__all__
    for name in zt.__all__:
        assert getattr(zt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = zt.nope


@pytest.mark.ranks
def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, zerotrain.runtime, zerotrain.runtime.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
