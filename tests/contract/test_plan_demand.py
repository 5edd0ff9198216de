"""Verdicts, margins and proposals of the planner; the engine's part equals its own check, byte for byte."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from zerotrain.contract.config import load, resolve
from zerotrain.contract.memory.nearest import Hardware, needs_of
from zerotrain.contract.planner import (
    CONVENTIONS,
    Demand,
    Fit,
    Limit,
    ModelShape,
    Terms,
    Tier,
    Workload,
    accelerator,
    bytes_text,
    demand,
    gpt_shape,
    guessed_shape,
    model_state_bytes,
    nearest,
    shape_of_config,
    summary,
    way_out,
)
from zerotrain.contract.planner.activations import activations
from zerotrain.contract.presets import PRESETS

pytestmark = pytest.mark.unit


GIB = 1 << 30
GB = 10**9
LLAMA_8B = shape_of_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
SMALL = gpt_shape(PRESETS["gpt-125m"], source="preset gpt-125m")
BF16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def workload(
    shape: ModelShape = LLAMA_8B,
    *,
    ranks: int = 8,
    per_worker: int = 8,
    on_host: bool = False,
    limits: dict[Tier, int] | None = None,
    **config: Any,
) -> Workload:
    given = {tier: Limit(num_bytes=size, source=f"the {tier}") for tier, size in (limits or {}).items()}
    return Workload(
        shape=shape,
        config=resolve(load({**BF16, **config}), world_size=ranks),
        ranks_per_worker=per_worker,
        on_host=on_host,
        limits=given,
    )


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, **more}


H100 = 85_520_809_984
ROOMY = {Tier.GPU: H100, Tier.HOST: 2048 * GIB, Tier.NVME: 8192 * GIB}


@pytest.mark.parametrize(
    ("parameters", "ranks", "expected_gb"),
    [
        (7_000_000_000, 8, (112.0, 38.5, 26.25, 14.0)),
        (7_500_000_000, 64, (120.0, 31.40625, 16.640625, 1.875)),
        (70_000_000_000, 8, (1120.0, 385.0, 262.5, 140.0)),
    ],
)
def test_published_tables(parameters: int, ranks: int, expected_gb: tuple[float, ...]) -> None:
    """The tables of the ZeRO paper and of its copies: 2 + 2 + 12 bytes, nothing else."""
    found = [model_state_bytes(parameters, ranks=ranks, stage=stage) / GB for stage in range(4)]
    assert found == list(expected_gb)


def test_tables_that_count_otherwise() -> None:
    """Some tables count no masters: 12 bytes and not 16. No convention gives 44 and 30 GB for 4 ranks."""
    paper, engine, _, bare, _ = CONVENTIONS
    found = [model_state_bytes(70 * GB, ranks=8, stage=stage, convention=bare) / GB for stage in range(4)]
    assert found == [840.0, 350.0, 227.5, 105.0]
    four = {
        (stage, convention.name): model_state_bytes(7 * GB, ranks=4, stage=stage, convention=convention) / GB
        for stage, convention in itertools.product((1, 2), CONVENTIONS)
    }
    assert four[1, paper.name] == 49.0
    assert four[2, paper.name] == 38.5
    assert not {44.0, 30.0} & set(four.values())
    assert model_state_bytes(7 * GB, ranks=8, stage=3, convention=engine) / GB == 15.75
    with pytest.raises(ValueError, match="stage one of"):
        model_state_bytes(1, ranks=1, stage=4)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engines_part_is_the_engines_check(ranks: int, on_host: bool) -> None:
    """The call that the engine makes before it allocates gives the planner's exact bytes."""
    blocks: list[dict[str, Any]] = [
        {},
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}},
    ]
    for stage, block in itertools.product((1, 2, 3), blocks):
        if "offload_param" in block and stage < 3:
            continue
        load_ = workload(
            SMALL, ranks=ranks, per_worker=ranks, on_host=on_host, zero_optimization=zero(stage, **block)
        )
        hardware = Hardware(on_host=on_host, shares_memory=on_host and ranks > 1, ranks_per_node=ranks)
        needs = needs_of(load_.config, SMALL.units(load_.config, on_host=on_host), hardware)
        found = demand(load_)
        disk, host = found.tier(Tier.NVME), found.tier(Tier.HOST)
        assert (disk.exact_bytes if disk else 0) == ranks * (needs.disk or 0)
        formulas = found.formulas
        peak = formulas.gpu.total_bytes + formulas.transient.peak_bytes
        if on_host:
            assert formulas.host.total_bytes + peak == needs.host
        else:
            assert host is not None
            assert (host.exact_bytes, peak) == (ranks * (needs.host or 0), needs.accelerator)


def verdicts(found: Demand) -> dict[str, str]:
    return {str(tier.tier): str(tier.verdict) for tier in found.tiers}


def test_verdicts() -> None:
    fits = demand(workload(limits=ROOMY, zero_optimization=zero(3)))
    assert fits.verdict is Fit.FITS
    gpu = fits.tier(Tier.GPU)
    assert gpu is not None
    assert gpu.total_bytes == gpu.exact_bytes + gpu.activation_bytes + gpu.overhead_bytes
    assert gpu.least_bytes < gpu.total_bytes
    for there, expected in (
        (None, Fit.UNKNOWN),
        (gpu.least_bytes - 1, Fit.DOES_NOT_FIT),
        (gpu.least_bytes, Fit.TIGHT),
        (gpu.total_bytes, Fit.TIGHT),
        (gpu.total_bytes * 100 // 96, Fit.TIGHT),
        (gpu.total_bytes * 100 // 94, Fit.FITS),
    ):
        limits = ROOMY if there is None else {**ROOMY, Tier.GPU: there}
        limits = {tier: size for tier, size in limits.items() if there is not None or tier is not Tier.GPU}
        found = demand(workload(limits=limits, zero_optimization=zero(3)))
        assert found.verdict is expected, there
        assert bytes_text(gpu.total_bytes) in summary(found)


def test_pinned_memory_is_reported_and_not_enforced() -> None:
    offloads = {"offload_optimizer": {"device": "cpu"}}
    found = demand(workload(limits={**ROOMY, Tier.PINNED: GIB}, zero_optimization=zero(2, **offloads)))
    assert verdicts(found) == {"gpu": "Fits", "host": "Fits", "pinned": "Tight"}
    assert found.verdict is Fit.TIGHT
    locked, host = found.tier(Tier.PINNED), found.formulas.host
    assert locked is not None
    assert locked.per_rank_bytes == host.grad_bytes + host.ring_bytes, "the states are not page-locked"
    assert 0 < locked.per_rank_bytes < host.optimizer_bytes
    pageable = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert demand(workload(limits=ROOMY, zero_optimization=zero(2, **pageable))).tier(Tier.PINNED) is None


def test_shared_memory_is_that_of_one_worker_on_cpus() -> None:
    one = demand(workload(SMALL, ranks=2, per_worker=2, on_host=True, zero_optimization=zero(3)))
    shared, host = one.tier(Tier.SHARED), one.tier(Tier.HOST)
    assert shared is not None
    assert host is not None
    assert 0 < shared.exact_bytes < host.exact_bytes
    two = demand(workload(SMALL, ranks=2, per_worker=1, on_host=True, zero_optimization=zero(3)))
    assert two.tier(Tier.SHARED) is None
    assert two.tier(Tier.GPU) is None


def test_a_guess_refuses_by_what_is_sharded_alone() -> None:
    shape = guessed_shape(8_030_261_248)
    found = demand(workload(shape, zero_optimization=zero(3)))
    gpu = found.tier(Tier.GPU)
    assert gpu is not None
    assert gpu.least_bytes == found.formulas.gpu.total_bytes
    known = demand(workload(zero_optimization=zero(3))).tier(Tier.GPU)
    assert known is not None
    assert gpu.total_bytes == pytest.approx(known.total_bytes, rel=0.15)


def test_a_guess_of_what_goes_to_the_host_refuses_nothing_either() -> None:
    """The inputs of layers that go to the host depend on a sequence length that may be a guess, too."""
    moved: dict[str, Any] = {
        "zero_optimization": zero(3),
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    known, guessed = (
        demand(workload(shape, **moved)).tier(Tier.HOST) for shape in (LLAMA_8B, guessed_shape(8_030_261_248))
    )
    assert known is not None
    assert guessed is not None
    assert guessed.activation_bytes > 0
    assert guessed.least_bytes == guessed.exact_bytes
    assert known.least_bytes == known.exact_bytes + known.activation_bytes


def test_on_a_gpu_an_input_comes_back_ahead() -> None:
    given: dict[str, Any] = {
        "zero_optimization": zero(3),
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    beside, within = (demand(workload(SMALL, on_host=on_host, **given)) for on_host in (False, True))
    _, forward, backward, _ = (
        gpu.activation_bytes - host.activation_bytes
        for gpu, host in zip(beside.phases, within.phases, strict=True)
    )
    assert (forward, backward) == (0, 2 * SMALL.context * SMALL.width)


@pytest.mark.parametrize("recompute", [{}, {"activation_checkpointing": {}}])
def test_autocasts_copies_of_weights_are_on_every_rank(recompute: dict[str, Any]) -> None:
    """Autocast's copies take two bytes per multiplied weight on each of the eight ranks, at stage 3 too."""
    given: dict[str, Any] = {"bf16": {"enabled": False}, "zero_optimization": zero(3), **recompute}
    autocast: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
    there = {**ROOMY, Tier.GPU: 26 * GIB}
    plain, cast = (demand(workload(limits=there, **given, **more)) for more in ({}, autocast))
    copies = 2 * LLAMA_8B.matmul_parameters
    gpu = cast.tier(Tier.GPU)
    assert gpu is not None
    assert gpu.activation_bytes > 0.9 * copies
    assert gpu.least_bytes > cast.formulas.gpu.total_bytes + 0.9 * copies
    forward = next(phase for phase in cast.phases if phase.name == "forward")
    assert forward.activation_bytes > copies
    assert cast.verdict is Fit.DOES_NOT_FIT
    assert cast.formulas == plain.formulas


def test_phases() -> None:
    found = demand(workload(zero_optimization=zero(3)))
    by_name = {phase.name: phase for phase in found.phases}
    sums = found.formulas.freed
    assert by_name["between steps"].engine_bytes == found.formulas.gpu.total_bytes - sums.total_bytes
    assert by_name["step"].activation_bytes == 0
    assert by_name["forward"].activation_bytes > 0
    peak = max(phase.total_bytes for phase in found.phases)
    gpu = found.tier(Tier.GPU)
    assert gpu is not None
    assert gpu.exact_bytes + gpu.activation_bytes == peak


def engine_bytes(**given: Any) -> dict[str, int]:
    """Return the engine's bytes beyond the persistent ones and those of the phase itself, by phase."""
    found = demand(workload(**given))
    own, kept = found.formulas.transient, found.formulas.gpu.total_bytes
    extra = {"forward": own.forward_bytes, "backward": own.backward_bytes, "step": own.step_bytes}
    return {phase.name: phase.engine_bytes - kept - extra.get(phase.name, 0) for phase in found.phases}


def test_sums_of_gradients_count_when_they_exist() -> None:
    """An accelerator frees a rank's part of them after the update."""
    sums = 4 * demand(workload(zero_optimization=zero(3))).formulas.inputs.trainable_numel // 8
    largest = 4 * LLAMA_8B.vocabulary * LLAMA_8B.width // 8
    found = engine_bytes(zero_optimization=zero(3))
    assert found == {"between steps": -sums, "forward": -sums, "backward": largest - sums, "step": 0}
    again = engine_bytes(zero_optimization=zero(3), gradient_accumulation_steps=2)
    assert again == {"between steps": -sums, "forward": 0, "backward": 0, "step": 0}
    assert set(engine_bytes(zero_optimization=zero(2), on_host=True).values()) == {0}
    assert set(engine_bytes(zero_optimization=zero(0)).values()) == {0}


def test_the_last_block_of_backward_counts_where_activations_are_few() -> None:
    short = replace(LLAMA_8B, context=16)
    found = demand(workload(short, zero_optimization=zero(2)))
    backward = next(phase for phase in found.phases if phase.name == "backward")
    assert backward.engine_bytes == found.formulas.gpu.total_bytes + found.formulas.transient.backward_bytes
    work = activations(short, found.workload.config)
    assert work.block_work_bytes < backward.activation_bytes < work.backward_bytes


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"zero_optimization": zero(0)}, ('"zero_optimization": {"stage": 1}',)),
        (
            {"zero_optimization": zero(3), "train_micro_batch_size_per_gpu": 8},
            ('"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4',),
        ),
        (
            {"zero_optimization": zero(3), "train_micro_batch_size_per_gpu": 7},
            ('"activation_checkpointing": {}',),
        ),
    ],
)
def test_the_nearest_that_fits(given: dict[str, Any], changes: tuple[str, ...]) -> None:
    tight = workload(limits=ROOMY, **given)
    assert demand(tight).verdict is Fit.DOES_NOT_FIT
    found = nearest(tight)
    assert found is not None
    assert found.changes == changes
    assert found.demand.verdict is Fit.FITS
    text = way_out(found, demand(tight))
    assert text.startswith(f"Nearest that fits: {changes[0]} (")


LLAMA_70B = shape_of_config(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
IN_HOST_MEMORY = {"device": "cpu"}


@pytest.mark.parametrize("accumulation", [1, 8])
def test_offloaded_gradients_let_large_models_fit(accumulation: int) -> None:
    """70B on four GPUs of 80 GB, and 8B on one of 24 GB with its weights there or in host memory."""
    more: dict[str, Any] = {"activation_checkpointing": {}, "gradient_accumulation_steps": accumulation}
    block = {"offload_optimizer": IN_HOST_MEMORY}
    plan = demand(
        workload(LLAMA_70B, ranks=4, per_worker=4, limits=ROOMY, zero_optimization=zero(3, **block), **more)
    )
    assert plan.verdict is Fit.FITS
    assert plan.formulas.gpu.grad_bytes < GIB < plan.formulas.host.grad_bytes
    card = {**ROOMY, Tier.GPU: 24 * GIB, Tier.HOST: 160 * GIB}
    for zero_ in (zero(2, **block), zero(3, **block, offload_param=IN_HOST_MEMORY)):
        one = workload(ranks=1, per_worker=1, limits=card, zero_optimization=zero_, **more)
        assert demand(one).verdict is Fit.FITS, zero_
    whole = workload(ranks=1, per_worker=1, limits=card, zero_optimization=zero(1, **block), **more)
    assert demand(whole).verdict is (Fit.DOES_NOT_FIT if accumulation > 1 else Fit.FITS)


def test_proposals_keep_the_batch_and_really_fit() -> None:
    """The plan of every proposed configuration has the verdict Fits, and each rank keeps its number of
    samples.
    """
    seen = set()
    for limit, host in itertools.product((24 * GIB, 60 * GIB), (2048 * GIB, 40 * GIB)):
        for stage, micro in itertools.product((0, 3), (1, 4)):
            tight = workload(
                limits={Tier.GPU: limit, Tier.HOST: host, Tier.NVME: GIB},
                zero_optimization=zero(stage),
                train_micro_batch_size_per_gpu=micro,
            )
            if demand(tight).verdict is not Fit.DOES_NOT_FIT:
                continue
            found = nearest(tight)
            if found is None:
                assert (limit, host) == (24 * GIB, 40 * GIB), (stage, micro)
                continue
            again = demand(replace(tight, config=found.demand.workload.config))
            assert again.verdict is Fit.FITS
            batch, ranks = again.workload.config.batch, again.workload.config.world_size
            samples = batch.micro_batch_size * batch.gradient_accumulation_steps * ranks
            assert samples == batch.train_batch_size
            # The file gives the samples of one rank, so more ranks have a larger batch.
            assert samples * 8 == tight.config.batch.train_batch_size * ranks
            seen.add(ranks)
    assert min(seen) == 8 < max(seen)


def test_a_drive_is_proposed_where_host_memory_is_short() -> None:
    tight = workload(
        SMALL, ranks=1, per_worker=1, on_host=True, limits={Tier.HOST: 1600 << 20}, zero_optimization=zero(0)
    )
    found = nearest(tight, Terms.of(tight.config, has_volume=False, most_workers=1))
    assert demand(tight).verdict is Fit.DOES_NOT_FIT
    assert found is not None
    assert any('"device": "nvme"} with spec.nvme' in change for change in found.changes)


def test_nothing_fits() -> None:
    tight = workload(limits={**ROOMY, Tier.GPU: GIB // 8}, zero_optimization=zero(3))
    assert nearest(tight) is None
    text = way_out(None, demand(tight))
    assert text.startswith("No setting that was looked at fits; each GPU would have to have ")


def test_accelerators_by_name_and_label() -> None:
    for name in ("H100-80GB", "h100", "NVIDIA-H100-80GB-HBM3"):
        found = accelerator(name)
        assert found is not None
        assert found.name == "H100-80GB"
        assert found.memory_bytes == H100
    for name in ("a100", "", "V100", "TPU"):
        assert accelerator(name) is None, name


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("NVIDIA-A100-SXM4-40GB", 300),
        ("NVIDIA-A100-SXM4-80GB", 300),
        ("A100-80GB", 300),
        ("a100-80", 300),
        ("NVIDIA-A100-PCIE-40GB", 32),
        ("NVIDIA-A100-80GB-PCIe", 32),
        ("A100-PCIe-80GB", 32),
    ],
)
def test_cards_in_slots_have_no_nvlink(name: str, gbps: float) -> None:
    found = accelerator(name)
    assert found is not None
    assert found.peer_gbps == gbps
