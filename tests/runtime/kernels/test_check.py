"""The first check of a device: one wrong bit excludes a family of kernels, and no other one."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.host_kernels import CPU, pretend_gpu, wrong_kernels
from zerotrain.contract.config import load, resolve
from zerotrain.runtime import _native, notices
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.kernels import check, device
from zerotrain.runtime.kernels.device import DeviceKernels, Family, find

GPU = torch.device("cuda", 0)


@pytest.mark.ranks
def test_the_host_build_equals_every_reference() -> None:
    assert check.refusals(_native.host_kernels(), CPU) == {}


@pytest.mark.ranks
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, torch.device("meta")])
def test_the_programs_defaults_are_not_the_checks(default: torch.dtype | torch.device) -> None:
    """A reference in another dtype would be smaller than what the kernels write."""
    change = torch.set_default_device if isinstance(default, torch.device) else torch.set_default_dtype
    check._pool.cache_clear()
    change(default)  # type: ignore[arg-type]
    try:
        assert check.refusals(_native.host_kernels(), CPU) == {}
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("function", "family", "place"),
    [
        ("sum_parts", Family.SUMS, lambda call: call["given"][0] if call["numel"] > 4000 else 0),
        ("sum_parts", Family.SUMS, lambda call: call["squares"] + 5 if call["numel"] == 2050 else 0),
        ("quantize", Family.QUANTIZE, lambda call: call["packed"] if call["bits"] == 4 else 0),
        ("dequantize", Family.QUANTIZE, lambda call: call["given"][1] if call["dtype"] == "f16" else 0),
        ("dequantize_sum", Family.QUANTIZE, lambda call: call["given"][1] + 4 * call["numel"] - 400),
        (
            "update",
            Family.ADAM,
            lambda call: call["given"][1][0].first + 80 if call["weight"] == "f16" else 0,
        ),
    ],
)
def test_one_wrong_bit_excludes_the_family(function: str, family: Family, place: Any) -> None:
    found = device.checked(wrong_kernels(function, place), CPU)
    assert set(found.refused) == {family}
    assert found.of(family) is None
    assert all(found.of(other) is not None for other in set(Family) - {family})


@pytest.mark.unit
def test_without_a_driver_nothing_is_used_and_the_log_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(image: bytes, index: int) -> None:
        raise RuntimeError("no CUDA driver: libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(device, "_found", {})
    monkeypatch.setattr(device, "read_image", lambda native: b"")
    monkeypatch.setattr(_native, "device_kernels", refuse)
    notices.log_once.cache_clear()
    comm = cast("Comm", SimpleNamespace(device=GPU, rank=0))
    config = resolve(load({"train_batch_size": 1, "bf16": {"enabled": True}}), world_size=1)
    with caplog.at_level(logging.WARNING, logger="zerotrain"):
        notices.log_kernels(config, comm)
        notices.log_kernels(config, comm)
    assert [record.message for record in caplog.records] == [
        "CUDA kernels (sums, quantize, adam) are not used on cuda:0, torch's operations are, which are "
        "slower: no CUDA driver: libcuda.so.1: cannot open shared object file"
    ]
    assert all(device.on_device(GPU).of(family) is None for family in Family)


@pytest.mark.unit
def test_updates_of_bf16_masters_on_a_gpu_are_torchs_and_the_log_says_so() -> None:
    def notice(device: torch.device, **zero: Any) -> str | None:
        block = {"enabled": True, "bf16_master_weights_and_grads": True}
        file = {"train_batch_size": 1, "bf16": block, "zero_optimization": zero}
        return notices.update_notice(resolve(load(file), world_size=1), device)

    assert str(notice(GPU)).startswith("bf16.bf16_master_weights_and_grads: updates on cuda:0 are torch's")
    assert notice(GPU, offload_optimizer={"device": "cpu", "ratio": 0.5}) is not None
    assert notice(GPU, offload_optimizer={"device": "cpu"}) is None
    assert notice(CPU) is None


@pytest.mark.unit
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_the_loader_names_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libcuda\.so\.1"):
        _native.device_kernels(b"", 0)
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        _native.driver_version()


@pytest.mark.unit
def test_an_installation_without_the_compiled_kernels_says_so(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match="built without nvcc"):
        device.read_image(cast("Any", SimpleNamespace(__file__=str(tmp_path / "_native.so"))))


@pytest.mark.unit
def test_only_plain_tensors_on_a_checked_device_get_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(torch.Tensor):
        pass

    plain = torch.zeros(3)
    assert find(plain, Family.SUMS) is None
    kernels = pretend_gpu(monkeypatch)
    assert find(plain, Family.SUMS) is kernels
    assert find(torch.nn.Parameter(plain), Family.SUMS) is kernels
    assert find(plain.as_subclass(Other), Family.SUMS) is None
    monkeypatch.setitem(device._found, CPU, DeviceKernels(kernels, {Family.SUMS: "wrong"}))
    assert find(plain, Family.SUMS) is None
    assert find(plain, Family.ADAM) is kernels
