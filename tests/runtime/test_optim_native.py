"""`DeepSpeedCPUAdam` trains with the native kernel: near torch's AdamW, and the same bits at every stage."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.support.training import Case, largest_difference, train_with_engine
from zerotrain.contract.config import load, resolve
from zerotrain.runtime.optim.native import NativeAdamRule
from zerotrain.runtime.optim.optimizer import native_rule_of

CLOSE = 1e-5
"""After three steps of 3e-3 on weights of order 0.1; the two differ in rounding alone."""


def native(stage: int, dtype: str) -> Case:
    return Case(stage=stage, dtype=dtype, optimizer="DeepSpeedCPUAdam", clip=1.0)


def test_the_configuration_chooses_the_rule() -> None:
    for kind, expected in (("DeepSpeedCPUAdam", True), ("CPUAdam", True), ("AdamW", False)):
        text = {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 1e-3}}}
        optimizer = resolve(load(text), world_size=1).optimizer
        assert optimizer is not None
        assert optimizer.native is expected
        if expected:
            rule = native_rule_of(optimizer)
            assert isinstance(rule, NativeAdamRule)
            assert rule.decoupled


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_close_to_torch_and_equal_at_every_stage(dtype: str) -> None:
    torch_run = run_ranks(2, train_with_engine, Case(stage=1, dtype=dtype, clip=1.0))[0]
    runs = [run_ranks(2, train_with_engine, native(stage, dtype))[0] for stage in (0, 1, 2, 3)]
    if dtype == "fp32":
        assert 0 < largest_difference(torch_run, runs[0]) < CLOSE  # 0: the kernel was not used
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(np.array_equal(run.parameters[name], value) for name, value in runs[0].parameters.items())
