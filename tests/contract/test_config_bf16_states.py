"""Masters, gradients and states in bf16: what they need, what they exclude, and the bytes that they take."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.memory import gpt_units, host_bytes, memory_inputs, snapshot_bytes, step_traffic
from zerotrain.contract.memory.model import optimizer_state_bytes

pytestmark = pytest.mark.unit


MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
STATES = {**MASTERS, "bf16_optimizer_states": True}


def resolved(bf16: dict[str, Any], **more: Any) -> EngineConfig:
    return resolve(load({"train_batch_size": 2, "bf16": bf16, **more}), world_size=2)


def offload(device: str) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}


def test_what_is_in_bf16() -> None:
    for block, expected in (
        ({"enabled": True}, (False, False, "fp32")),
        (MASTERS, (True, False, "bf16")),
        (STATES, (True, True, "bf16")),
        ({**STATES, "enabled": False}, (False, False, "fp32")),
    ):
        precision = resolved(block).precision
        found = precision.bf16_masters, precision.bf16_states, precision.grad_accum_dtype
        assert found == expected, block


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", [None, "AdamW", "Adam", "SGD", "Adagrad", "Lion"])
def test_it_runs_at_every_stage(stage: int, kind: str | None) -> None:
    optimizer = {"optimizer": {"type": kind}} if kind else {}
    config = resolved(STATES, zero_optimization={"stage": stage}, **optimizer)
    assert config.unsupported == ()
    assert not config.notices


@pytest.mark.parametrize("kind", ["Muon", "Lamb", "OneBitAdam"])
def test_optimizers_that_need_fp32_are_refused(kind: str) -> None:
    (found,) = resolved(STATES, optimizer={"type": kind}).unsupported
    assert found.path == "bf16.bf16_master_weights_and_grads"
    assert found.reason == f"{kind} needs fp32 masters, gradients and states."
    assert 'optimizer.type to "AdamW"' in found.way_out


def test_an_untested_optimizer_is_refused() -> None:
    file = {"optimizer": {"type": "RAdam"}, "zero_allow_untested_optimizer": True}
    assert [item.path for item in resolved(STATES, **file).unsupported] == [
        "bf16.bf16_master_weights_and_grads"
    ]


@pytest.mark.parametrize(
    ("block", "more", "words"),
    [
        (
            {"enabled": True, "bf16_optimizer_states": True},
            {},
            r"^bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads.*to true too",
        ),
        (
            {**STATES, "store_param_remainders": True},
            {},
            r"^bf16.store_param_remainders: must be false with .*no lower half.*Remove one of the two",
        ),
        (
            STATES,
            {"data_types": {"grad_accum_dtype": "fp32"}},
            r"^data_types.grad_accum_dtype: must be bf16 with .*Remove it",
        ),
        (STATES, {"data_types": {"grad_accum_dtype": "fp16"}}, "must be bf16 with .*; got 'fp16'"),
    ],
)
def test_contradictions_are_refused(block: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(block, **more)


def test_gradients_that_are_said_to_be_bf16_are_no_contradiction() -> None:
    for name in ("bf16", "BFloat16", "auto"):
        config = resolved(STATES, data_types={"grad_accum_dtype": name})
        assert config.precision.grad_accum_dtype == "bf16"


def test_offloaded_states_have_no_remainders() -> None:
    for device in ("cpu", "nvme"):
        assert resolved({"enabled": True}, **offload(device)).precision.store_param_remainders
        assert not resolved(MASTERS, **offload(device)).precision.store_param_remainders


def test_bytes_of_an_element() -> None:
    def state_bytes(kind: str, **more: bool) -> int:
        optimizer = resolved({"enabled": True}, optimizer={"type": kind}).optimizer
        return optimizer_state_bytes(optimizer, compute_bytes=2, **more)

    for kind, moments in (("AdamW", 2), ("Lion", 1), ("SGD", 0)):
        assert state_bytes(kind) == 4 + 4 * moments
        assert state_bytes(kind, bf16_masters=True) == 4 * moments
        assert state_bytes(kind, bf16_masters=True, bf16_states=True) == 2 * moments


def test_bytes_of_a_rank() -> None:
    """The states of AdamW take 4 bytes and the weight 2, which the update reads."""
    config = resolved(STATES, **offload("nvme"))
    inputs = memory_inputs(config, gpt_units(world_size=2, d_model=128, layers=2, context=16))
    own = inputs.trainable_numel // 2
    assert (inputs.grad_bytes, inputs.optimizer_bytes, inputs.reduce_bytes) == (2, 4, 2)
    assert host_bytes(inputs).grad_bytes == 2 * own
    assert snapshot_bytes(inputs) == (2 + 4) * own
    traffic = step_traffic(inputs)
    assert traffic.nvme_bytes == 2 * 4 * own
    assert (traffic.pcie_down_bytes, traffic.pcie_up_bytes) == ((2 + 2) * own, 2 * own)
