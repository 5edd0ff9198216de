"""AdamW uses the native kernel unless `torch_adam` is set.

It is close to torch's, and has the same bits at every stage.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.support.training import Case, largest_difference, train_with_engine
from tests.support.unit_updates import update_on
from zerotrain.contract.config import ConfigError, OptimizerConfig, load, resolve
from zerotrain.runtime.optim.fused import FusedAdamRule, FusedKernel
from zerotrain.runtime.optim.native import NativeAdagradRule, NativeAdamRule, NativeKernel, NativeLionRule
from zerotrain.runtime.optim.optimizer import rule_for
from zerotrain.runtime.optim.rules import AdagradRule, AdamRule, LionRule, SGDRule
from zerotrain.runtime.optim.update import TorchKernel

CLOSE = 1e-5
"""Tolerance after three steps of 3e-3 on weights of order 0.1; the two differ in rounding alone."""


def native(stage: int, dtype: str) -> Case:
    return Case(stage=stage, dtype=dtype, torch_adam=False, clip=1.0)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "torch_adam", "expected"),
    [
        ("DeepSpeedCPUAdam", False, NativeAdamRule),
        ("CPUAdam", False, NativeAdamRule),
        ("AdamW", False, NativeAdamRule),
        ("Adam", False, NativeAdamRule),
        ("AdamW", True, AdamRule),
        ("DeepSpeedCPUAdam", True, AdamRule),
        ("Adagrad", False, NativeAdagradRule),
        ("Adagrad", True, AdagradRule),
        ("Lion", False, NativeLionRule),
        ("Lion", True, LionRule),
        ("SGD", False, SGDRule),
    ],
)
def test_the_configuration_chooses_the_rule(kind: str, torch_adam: bool, expected: type) -> None:
    params = {"lr": 1e-3} | ({"torch_adam": True} if torch_adam else {})
    text = {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}
    optimizer = resolve(load(text), world_size=1).optimizer
    assert optimizer is not None
    assert type(rule_for(optimizer)) is expected


@pytest.mark.unit
@pytest.mark.parametrize("rule", [NativeAdamRule(), NativeAdagradRule(), NativeLionRule()])
def test_the_device_chooses_the_kernel(rule: NativeAdamRule | NativeAdagradRule | NativeLionRule) -> None:
    assert type(rule.kernel(update_on("cpu"))) is NativeKernel
    on_gpu = rule.kernel(update_on("cuda"))
    assert type(on_gpu) is (FusedKernel if isinstance(rule, NativeAdamRule) else TorchKernel)


@pytest.mark.unit
def test_without_compiled_code_only_the_named_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zerotrain.runtime.optim.native", None)
    assert type(rule_for(OptimizerConfig(type="AdamW"))) is FusedAdamRule
    with pytest.raises(ConfigError, match="native module"):
        rule_for(OptimizerConfig(type="AdamW", native=True))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_close_to_torch_and_equal_at_every_stage(dtype: str) -> None:
    torch_run = run_ranks(2, train_with_engine, Case(stage=1, dtype=dtype, clip=1.0))[0]
    runs = [run_ranks(2, train_with_engine, native(stage, dtype))[0] for stage in (0, 1, 2, 3)]
    if dtype == "fp32":
        assert 0 < largest_difference(torch_run, runs[0]) < CLOSE  # 0: the kernel was not used
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(np.array_equal(run.parameters[name], value) for name, value in runs[0].parameters.items())
