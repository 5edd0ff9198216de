"""Operations of a model by formula, compared with counts by hand; peaks by the names that drivers give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.test_plan_demand import LLAMA_8B
from zerotrain.contract.planner import Adapters, ModelFlops, flops_of, flops_per_token, peak_tflops

pytestmark = pytest.mark.unit


def test_a_model_that_is_trained_whole_costs_6_n_d_and_attention() -> None:
    shape, context = LLAMA_8B, 2048
    # Llama 3 8B: 32 layers; projections of 4096 to 4096, 1024, 1024 and back, MLP of 14336, head of 128256.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    by_hand = 6 * (32 * layer + 4096 * 128256) + 3 * 2 * context * 32 * 4096
    assert flops_of(shape).training(context) == pytest.approx(by_hand, rel=1e-3)
    assert flops_of(shape).training(shape.context) == 3 * flops_per_token(shape)


@pytest.mark.parametrize(
    ("targets", "adapter"),
    [
        (("q_proj", "v_proj"), (4096 + 4096) + (4096 + 1024)),
        ((), 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)),
    ],
    ids=["two", "all"],
)
def test_a_model_with_adapters_costs_4_n_d_and_6_for_them(targets: tuple[str, ...], adapter: int) -> None:
    shape, context, rank = replace(LLAMA_8B, adapters=Adapters(rank=16, targets=targets)), 2048, 16
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    adapters, attention = 32 * rank * adapter, 3 * 2 * context * 32 * 4096
    by_hand = 4 * (32 * layer + 4096 * 128256) + 6 * adapters + attention
    assert flops_of(shape).training(context) == pytest.approx(by_hand, rel=1e-4)
    assert flops_of(shape).trained == adapters


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    assert ModelFlops(trained=10, frozen=1000, attention_width=4).training(8) == 6 * 10 + 4 * 1000 + 6 * 8 * 4


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA B200", "fp32", None),
    ],
)
def test_the_peak_is_that_of_the_very_device(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak
