"""Offloading: what may be offloaded, where it goes, and which combinations are rejected by name."""

from __future__ import annotations

from typing import Any

import pytest

from zerotrain.contract.config import ConfigError, EngineConfig, load, resolve
from zerotrain.contract.config.encoding import REMAINDERS

pytestmark = pytest.mark.unit


def resolved(stage: int = 2, **more: Any) -> EngineConfig:
    """Return a configuration with these top-level blocks; `zero` goes into zero_optimization."""
    zero = {"stage": stage, **more.pop("zero", {})}
    return resolve(load({"zero_optimization": zero, **more}), world_size=2)


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"offload_optimizer": {"device": "nvme"}}
BF16 = {"enabled": True}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_states_are_offloaded_at_every_stage(stage: int, device: str) -> None:
    config = resolved(stage, zero={"offload_optimizer": {"device": device, "ratio": 0.5}})
    assert config.unsupported == ()
    assert config.zero.offload_optimizer is not None
    assert (config.zero.offload_optimizer.device, config.zero.offload_optimizer.ratio) == (device, 0.5)
    assert config.zero.offload_optimizer.just_in_time is None


def test_parameters_only_at_stage_3() -> None:
    """The block has no effect below stage 3, as in DeepSpeed, whose examples write it at every stage."""
    path = "zero_optimization.offload_param.device"
    block = {"offload_param": {"device": "nvme", "max_in_cpu": 7}}
    for stage in range(3):
        config = resolved(stage, zero=block)
        assert config.unsupported == ()
        assert config.zero.offload_param is None
        (message,) = (notice.message for notice in config.notices if notice.path == path)
        assert f"No effect at stage {stage}" in message
        (shown,) = (line for line in config.report if line.path == path)
        assert (shown.value, shown.effect) == ("none", message)
    config = resolved(3, zero=block)
    assert config.unsupported == ()
    assert config.zero.offload_param is not None
    assert config.zero.offload_param.max_in_cpu == 7


@pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam"])
def test_joint_rules_stay_on_the_accelerator(kind: str) -> None:
    (found,) = resolved(1, zero=CPU, optimizer=optimizer(kind)).unsupported
    assert found.path == "zero_optimization.offload_optimizer.device"
    assert kind in found.reason
    assert resolved(1, optimizer=optimizer(kind)).unsupported == ()


def test_optimizers_from_outside_stay_there_too() -> None:
    file: dict[str, Any] = {"zero_allow_untested_optimizer": True, "optimizer": optimizer("RAdam")}
    (found,) = resolved(1, zero=CPU, **file).unsupported
    assert "RAdam" in found.reason


def test_remainders_follow_precision_offload_and_optimizer() -> None:
    def stored(**file: Any) -> bool:
        return resolved(**file).precision.store_param_remainders

    assert stored(zero=CPU, bf16=BF16)
    assert stored(zero=NVME, bf16=BF16, optimizer=optimizer("Lion"))
    assert not stored(bf16=BF16)
    assert stored(bf16={**BF16, "store_param_remainders": True})
    assert not stored(zero=CPU, bf16={**BF16, "store_param_remainders": False})
    assert not stored(zero=CPU)
    assert not stored(zero=CPU, fp16=BF16)
    assert not stored(zero=CPU, bf16=BF16, optimizer=optimizer("SGD"))
    assert not stored(zero=CPU, bf16=BF16, optimizer=optimizer("AdamW", torch_adam=True))
    assert not stored(zero=CPU, bf16=BF16, optimizer=optimizer("Adam", amsgrad=True))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"bf16": {"store_param_remainders": True}}, "needs bf16.enabled"),
        ({"fp16": BF16, "bf16": {"store_param_remainders": True}}, "needs bf16.enabled"),
        (
            {"bf16": {**BF16, "store_param_remainders": True}, "optimizer": optimizer("SGD")},
            "a native update, which SGD has not",
        ),
        (
            {
                "bf16": {**BF16, "store_param_remainders": True},
                "optimizer": optimizer("AdamW", amsgrad=True),
            },
            "AdamW with amsgrad",
        ),
    ],
)
def test_remainders_that_cannot_be(file: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolved(**file)
    assert caught.value.path == REMAINDERS


def test_the_spill() -> None:
    spill = {"encryption": "none", "max_bytes": 2**30, "paths": ["/a", "/b"]}
    config = resolved(zero={**NVME, "spill": spill})
    assert config.zero.spill.encryption == "None"
    assert (config.zero.spill.max_bytes, config.zero.spill.paths) == (2**30, ("/a", "/b"))
    assert resolved(zero=NVME).zero.spill.encryption is None
    assert resolved(zero={**NVME, "spill": {"encryption": None}}).zero.spill.encryption is None


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({**NVME, "spill": {"paths": []}}, "at least one folder"),
        ({**NVME, "spill": {"paths": ["/a", "/a"]}}, "each once"),
        (
            {"offload_optimizer": {"device": "nvme", "nvme_path": "/c"}, "spill": {"paths": ["/a"]}},
            "must hold nvme_path, which is '/c'",
        ),
        ({**NVME, "spill": {"encryption": "XTS"}}, "must be one of AEAD, None"),
        ({**NVME, "spill": {"max_bytes": 0}}, "at least 1"),
    ],
)
def test_spills_that_contradict_themselves(zero: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(zero=zero)


def test_a_spill_without_nvme_has_no_effect_and_is_reported() -> None:
    found = resolved(zero={**CPU, "spill": {"encryption": "None", "max_bytes": 5}}).notices
    assert [notice.path for notice in found if "nothing is offloaded" in notice.message] == [
        "zero_optimization.spill.encryption",
        "zero_optimization.spill.max_bytes",
    ]


def test_two_folders_are_one_spill() -> None:
    blocks = {
        name: {"device": "nvme", "nvme_path": path}
        for name, path in (("offload_optimizer", "/a"), ("offload_param", "/b"))
    }
    assert any("share one spill" in notice.message for notice in resolved(3, zero=blocks).notices)


def test_hints_are_named() -> None:
    block = {"device": "nvme", "pipeline_read": True, "pipeline_write": True, "fast_init": True}
    notices = {notice.path for notice in resolved(zero={"offload_optimizer": block}).notices}
    assert "zero_optimization.offload_optimizer.fast_init" in notices
    assert "zero_optimization.offload_optimizer.pipeline_read" not in notices, "it is what happens anyway"


def test_the_file_io_is_honoured() -> None:
    config = resolved(zero=NVME, aio={"queue_depth": 8, "block_size": 2**18})
    assert (config.aio.queue_depth, config.aio.block_size) == (8, 2**18)
    assert {line.status for line in config.report if line.path.startswith("aio.q")} == {"implemented"}
