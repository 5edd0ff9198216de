"""Step times and costs, compared with sums by hand and with published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.contract.test_plan_demand import LLAMA_8B, SMALL, workload, zero
from zerotrain.contract.planner import Adapters, Pace, Rates, demand, flops_per_token, pace, rates_of
from zerotrain.contract.planner.machines import ACCELERATORS, FP32_TFLOPS, accelerator

pytestmark = pytest.mark.unit


RATES = Rates(tflops=100.0, device=1000.0, host=100.0, pcie=25.0, peer=100.0, network=10.0, nvme=5.0)
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0}


def paced(rates: Rates = RATES, **given: Any) -> Pace:
    found = pace(demand(workload(**given)), rates)
    assert found is not None
    return found


def seconds(found: Pace, phase: str, what: str) -> float:
    return next(part.seconds for part in found.parts if (part.phase, part.what) == (phase, what))


def test_compute() -> None:
    found = paced(ranks=1, per_worker=1, zero_optimization=zero(0))
    tokens = 2048
    forward = flops_per_token(LLAMA_8B) * tokens / 100e12
    assert seconds(found, "forward", "compute") == pytest.approx(forward)
    assert seconds(found, "backward", "compute") == pytest.approx(2 * forward)
    again = paced(ranks=1, per_worker=1, zero_optimization=zero(0), activation_checkpointing={})
    assert seconds(again, "backward", "compute") == pytest.approx(3 * forward)
    assert found.tokens == tokens
    assert found.bound_by == "compute in backward"
    update = LLAMA_8B.parameters * (4 + 2 * 12 + 2) / 1000e9
    assert seconds(found, "optimizer", "device memory") == pytest.approx(update, rel=1e-3)
    assert found.seconds == pytest.approx(3 * forward + update, rel=1e-3)
    assert found.tokens_per_second == pytest.approx(tokens / found.seconds)


@pytest.mark.parametrize(("block", "gigaflops"), [({}, 31.67), ({"activation_checkpointing": {}}, 47.23)])
def test_frozen_weights_have_no_gradient_to_compute(block: dict[str, Any], gigaflops: float) -> None:
    """Llama 3 8B with LoRA of rank 16 at two layers, a token of 2048: forward 15.56 GFLOP, backward 16.11,
    and forward again where it is recomputed. A training of all weights takes 46.64 and 62.18.
    """
    shape = replace(LLAMA_8B, context=2048, adapters=Adapters(rank=16, targets=("q_proj", "v_proj")))
    found = paced(shape=shape, ranks=1, per_worker=1, zero_optimization=zero(0), **block)
    computed = sum(seconds(found, phase, "compute") for phase in ("forward", "backward"))
    assert computed * 100e12 / 2048 == pytest.approx(gigaflops * 1e9, rel=2e-4)
    assert seconds(found, "forward", "compute") * 100e12 / 2048 == pytest.approx(15.56e9, rel=2e-4)


def test_the_network_of_several_workers() -> None:
    """A rank moves 3 M at stage 3, of which (W - 1) / W leave a worker, over that worker's network."""
    keep = {"stage3_max_reuse_distance": 0}
    one = paced(ranks=8, per_worker=8, zero_optimization=zero(3, **keep))
    two = paced(ranks=8, per_worker=4, zero_optimization=zero(3, **keep))
    model = 2 * LLAMA_8B.parameters
    assert seconds(one, "forward", "peers") == pytest.approx(model * 7 / 8 / 100e9, rel=0.01)
    assert seconds(two, "forward", "network") == pytest.approx(model / 2 / 10e9, rel=0.01)
    assert seconds(two, "backward", "network") == pytest.approx(2 * model / 2 / 10e9, rel=0.01)
    assert two.bound_by == "network in backward"
    assert two.seconds > one.seconds


def test_offloaded_updates_hide_behind_forward() -> None:
    given: dict[str, Any] = {"ranks": 1, "per_worker": 1, "train_micro_batch_size_per_gpu": 16}
    cpu: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    hidden = paced(zero_optimization=zero(0, **cpu), **given)
    cpu["offload_optimizer"]["just_in_time"] = False
    shown = paced(zero_optimization=zero(0, **cpu), **given)
    update = seconds(shown, "optimizer", "host memory")
    assert shown.seconds - hidden.seconds == pytest.approx(update)
    assert all(part.is_hidden for part in hidden.parts if part.phase == "optimizer")
    drive = {"offload_optimizer": {"device": "nvme"}}
    bound = paced(ranks=1, per_worker=1, zero_optimization=zero(0, **drive))
    assert bound.bound_by == "drive in optimizer"
    assert seconds(bound, "optimizer", "drive") == pytest.approx(20 * LLAMA_8B.parameters / 5e9, rel=0.01)


def test_gradients_cross_the_bus_in_backward() -> None:
    """A rank's 4 bytes go down after each pass; sums that stay on the device go down in the update."""
    given: dict[str, Any] = {"ranks": 2, "per_worker": 2, "gradient_accumulation_steps": 3}
    cpu: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    leave, stay = (paced(zero_optimization=zero(stage, **cpu), **given) for stage in (2, 1))
    share = LLAMA_8B.parameters / 2
    assert seconds(leave, "backward", "PCIe") == pytest.approx(3 * 4 * share / 25e9, rel=0.01)
    assert not any(part.what == "PCIe" for part in stay.parts if part.phase == "backward")
    # Remainders: the weight goes down and comes up.
    assert seconds(leave, "optimizer", "PCIe") == pytest.approx(2 * share / 25e9, rel=0.01)
    assert seconds(stay, "optimizer", "PCIe") == pytest.approx((4 + 2) * share / 25e9, rel=0.01)
    weights = paced(zero_optimization=zero(3, **cpu, offload_param={"device": "cpu"}), **given)
    halves = seconds(weights, "forward", "PCIe")
    assert halves == pytest.approx(3 * 2 * share / 25e9, rel=0.01)
    assert seconds(weights, "backward", "PCIe") == pytest.approx(halves + 2 * 4 * share / 25e9, rel=0.01)


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("micro", [1, 64])
def test_spilled_parameters_are_read_by_the_passes(micro: int, just_in_time: bool) -> None:
    """The passes read 2 bytes per element for forward and for backward; the update moves 10 of states and the
    weight.
    """
    blocks: dict[str, Any] = {
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme", "just_in_time": just_in_time},
        "stage3_max_reuse_distance": 0,
    }
    given: dict[str, Any] = {"ranks": 1, "per_worker": 1, "train_micro_batch_size_per_gpu": micro}
    found = paced(zero_optimization=zero(3, **blocks), **given)
    parameters = LLAMA_8B.parameters
    read = 2 * parameters / 5e9
    assert seconds(found, "forward", "drive") == pytest.approx(read, rel=0.01)
    assert seconds(found, "backward", "drive") == pytest.approx(read, rel=0.01)
    update = 2 * (10 + 2) * parameters / 5e9
    assert seconds(found, "optimizer", "drive") == pytest.approx(update, rel=0.01)
    compute = seconds(found, "forward", "compute")
    backward = max(2 * compute, read)
    if just_in_time:
        assert found.seconds == pytest.approx(backward + max(compute, update + read), rel=0.01)
    else:
        assert found.seconds == pytest.approx(backward + max(compute, read) + update, rel=0.01)
    shown = sum(part.seconds for part in found.parts if not part.is_hidden)
    assert shown == pytest.approx(found.seconds)


def test_unknown_rates_are_named() -> None:
    found = paced(Rates(tflops=100.0), ranks=8, per_worker=4, zero_optimization=zero(3))
    assert set(found.missing) == {"network", "device"}
    assert pace(demand(workload(zero_optimization=zero(3))), Rates()) is None
    shared = pace(demand(workload(SMALL, ranks=2, per_worker=2, on_host=True)), Rates(tflops=0.1, host=10.0))
    assert shared is not None
    assert shared.missing == (), "ranks of one worker on CPUs send nothing"
    for values, words in (({"warp": 1.0}, "no rate; known are tflops"), ({"peer": 0.0}, "must be positive")):
        with pytest.raises(ValueError, match=words):
            Rates().given(values, "given")


def test_cost() -> None:
    """A published table: 55 hours at 24.80 an hour cost 1,364 per billion tokens, at 5,051 tokens a
    second.
    """
    found = Pace(parts=(), seconds=1.0, tokens=round(1e9 / 55 / 3600), workers=1, bound_by="")
    assert found.cost_per_billion(24.80) == pytest.approx(1364.0, abs=0.5)
    assert found.tokens_per_second == pytest.approx(5051, abs=1)


@pytest.mark.parametrize(
    ("parameters", "device", "tokens_per_second", "is_possible"),
    [
        (7e9, "A100", 8_500, False),
        (13e9, "A100", 5_200, False),
        (30e9, "A100", 2_800, False),
        (70e9, "H100", 2_200, True),  # 93 % of the peak: no program reaches it
        (70e9, "H100", 950, True),
    ],
)
def test_published_throughput(
    parameters: float, device: str, tokens_per_second: float, is_possible: bool
) -> None:
    """Six operations per weight and token, recomputation not counted, are compared with the data sheet's
    peak.
    """
    assert (6 * parameters * tokens_per_second / 1e12 < PEAK_TFLOPS[device]) is is_possible


def test_data_sheets() -> None:
    device = accelerator("H100")
    assert device is not None
    assert device.tflops == PEAK_TFLOPS["H100"]
    rates = rates_of(device)
    assert rates.tflops == pytest.approx(395.6)
    assert rates.network is None
    assert "data sheet" in rates.sources["tflops"]
    assert rates_of(None) == Rates()


def test_fp32_has_a_peak_of_its_own() -> None:
    """The engine does not use TF32, so fp32 products reach a fraction of the speed of bf16 ones."""
    device = accelerator("A100-80GB")
    narrow, wide = rates_of(device, "bf16"), rates_of(device, "fp32")
    assert narrow.tflops == pytest.approx(0.4 * 312)
    assert wide.tflops == pytest.approx(0.4 * 19.5)
    assert wide.sources["tflops"] == "40% of the A100-80GB's data sheet, fp32"
    given: dict[str, Any] = {"ranks": 8, "per_worker": 8, "zero_optimization": zero(3)}
    fast, slow = paced(narrow, **given), paced(wide, **given, bf16={"enabled": False})
    assert seconds(slow, "backward", "compute") == pytest.approx(16 * seconds(fast, "backward", "compute"))
    assert {item.name for item in ACCELERATORS if item.fp32_tflops is None} == {"B200-180GB"}
    assert set(FP32_TFLOPS) < {item.name for item in ACCELERATORS}
    unknown = rates_of(accelerator("B200"), "fp32")
    assert unknown.tflops is None
    found = paced(unknown, **given, bf16={"enabled": False})
    assert found.missing == ("tflops",)
