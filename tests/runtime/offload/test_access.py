"""Access to offloaded states, in host memory and in the encrypted spill store, for both encodings.

Reads give what the device would hold, training continues from written values, and freezing moves states bit
for bit.
"""

from __future__ import annotations

import tempfile
from itertools import product

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.runtime.offload.test_parity import Run, build, digest_of, one_step, start
from tests.support.ranks import run_ranks
from tests.support.tiers import with_slow_rows
from tests.support.training import world
from zerotrain.contract.config import ConfigError
from zerotrain.runtime.engine import Engine
from zerotrain.runtime.zero.rounding import round_half_up

pytestmark = pytest.mark.ranks


KINDS = ("exp_avg", "exp_avg_sq")


def read(engine: Engine) -> dict[str, torch.Tensor]:
    """Return everything that can be read of every trained parameter."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = zt.get_full_fp32(parameter)
            found[f"{name} here"] = zt.get_local_fp32(parameter)
            for kind in KINDS:
                found[f"{name} {kind}"] = zt.get_full_optimizer_state(parameter, kind)
                found[f"{name} {kind} here"] = zt.get_local_optimizer_state(parameter, kind)
    return found


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    with zt.full_parameters(engine.module):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def write_states(engine: Engine) -> None:
    """Write states: each write can be read back in every digit, and no other value changes."""
    before, target = read(engine), engine.module.get_parameter("wide.weight")
    values = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    zt.set_full_fp32(target, values)
    zt.set_full_optimizer_state(target, "exp_avg", values * 2)
    zt.set_local_optimizer_state(target, "exp_avg_sq", zt.get_local_fp32(target).square())
    after = read(engine)
    assert after["wide.weight"].equal(values)
    assert after["wide.weight exp_avg"].equal(values * 2)
    assert after["wide.weight exp_avg_sq"].equal(values.square())
    assert all(after[key].equal(value) for key, value in before.items() if not key.startswith("wide.weight"))
    splits = engine.core.options.placement.splits_masters
    rounded = round_half_up(values) if splits else values.bfloat16()
    assert weights(engine)["wide.weight"].equal(rounded)
    bias = engine.module.get_parameter("wide.bias")
    zt.set_local_fp32(bias, zt.get_local_fp32(bias) + 1e-3)
    assert read(engine)["wide.bias"].equal(before["wide.bias"] + 1e-3)


def write_weights(engine: Engine) -> None:
    """Overwrite weights: they become the masters, and their neighbours keep every digit."""
    before = read(engine)
    with torch.no_grad(), zt.full_parameters(engine.module, modifier_rank=0):
        if world()[0] == 0:
            engine.module.get_parameter("wide.weight")[3:5] += 1.0
    after, whole = read(engine), weights(engine)
    same = torch.ones(8 * 48, dtype=torch.bool)
    same[3:5] = False
    assert after["wide.weight"][same].equal(before["wide.weight"][same])
    assert after["wide.bias"].equal(before["wide.bias"])
    written, master = whole["wide.weight"][3:5].float(), after["wide.weight"][3:5]
    if engine.config.zero.stage == 3 or not engine.core.options.placement.splits_masters:
        assert master.equal(written)
    else:  # in place: what was cut off stays cut off, below half a unit in the last place
        assert round_half_up(master).float().equal(written)


def script(run: Run) -> list[str]:
    """Return digests after every part of the script."""
    with tempfile.TemporaryDirectory() as folder:
        engine = start(run, folder)
        found = []
        for part in (write_states, write_weights, freeze, unfreeze, lambda _: None):
            for step in range(2):
                one_step(engine, step)
            part(engine)
            found.append(digest_of(engine))
        engine.close()
        return found


def freeze(engine: Engine) -> None:
    """Freeze a bias; its neighbour in the unit stays as it is."""
    engine.module.get_parameter("blocks.0.bias").requires_grad_(False)
    before = read(engine)
    engine(torch.zeros(2, 48))
    assert all(value.equal(before[key]) for key, value in read(engine).items())


def unfreeze(engine: Engine) -> None:
    """Unfreeze a bias: it gets a new master, and zeros."""
    before, weight = read(engine), weights(engine)["blocks.0.bias"]
    engine.module.get_parameter("blocks.0.bias").requires_grad_(True)
    engine(torch.zeros(2, 48))
    after = read(engine)
    assert all(after[key].equal(value) for key, value in before.items())
    assert after["blocks.0.bias"].equal(weight.float())
    assert not any(after[f"blocks.0.bias {kind}"].any() for kind in KINDS)


def scripts(runs: tuple[Run, ...]) -> list[list[str]]:
    return [script(run) for run in runs]


@pytest.mark.parametrize("stage", with_slow_rows([0, 2, 3], quick=[3]))
def test_access_is_the_same_on_every_tier(stage: int) -> None:
    tiers = ("none", "cpu", "encrypted")
    runs = tuple(Run(tier=tier, stage=stage, splits=splits) for splits, tier in product((False, True), tiers))
    for rank in run_ranks(2, scripts, runs):
        for index in range(0, len(runs), len(tiers)):
            plain, host, spill_store = rank[index : index + len(tiers)]
            assert plain == host == spill_store, f"stage {stage}, {runs[index]}"


def first_masters(stage: int) -> None:
    """Check that masters are the fp32 values of the model in every digit, also halfway between weights."""
    for tier in ("none", "cpu", "encrypted"):
        with tempfile.TemporaryDirectory() as folder:
            ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 3.3961e38])
            engine = start(Run(tier=tier, stage=stage, splits=True), folder, first=ties)
            expected = build()
            with torch.no_grad():
                expected.wide.bias[:4] = ties
            whole = weights(engine)
            for name, parameter in engine.module.named_parameters():
                plain = expected.get_parameter(name).detach()
                assert zt.get_full_fp32(parameter).equal(plain), name
                assert whole[name].equal(round_half_up(plain)), name
            engine.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_first_masters_are_exact(stage: int) -> None:
    run_ranks(2, first_masters, stage)


def refused(optimizer: str) -> list[str]:
    texts = []
    for extra in ({"offload_optimizer": {"device": "cpu"}}, {}):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True, "store_param_remainders": not extra},
            "zero_optimization": {"stage": 1, **extra},
            "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        }
        with pytest.raises(ConfigError) as caught:
            zt.initialize(model=nn.Linear(4, 4), config=config)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("optimizer", ["Lamb", "OneBitAdam"])
def test_joint_rules_refuse(optimizer: str) -> None:
    offloaded, split = run_ranks(1, refused, optimizer)[0]
    assert "offload_optimizer" in offloaded
    assert optimizer in offloaded
    assert "store_param_remainders" in split
