"""Every proposal of the planner, carried out in the job, is admitted by the operator and needs what it
says.
"""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest

from zerotrain.contract.planner import Demand, Fit, Proposal, Rates, Tier, TierDemand, pace
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.api.planning import plan_job
from zerotrain.operator.api.validation import refusals

pytestmark = pytest.mark.unit


RATES = Rates(tflops=400.0, device=2000.0, host=200.0, pcie=25.0, peer=300.0, network=50.0, nvme=5.0)
GROUP = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
SHARED = {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}
CLAIMED = {"volume": {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}}
ELSEWHERE = {"device": "cpu", "nvme_path": "/x"}
OWN = {"volume": {"emptyDir": {"sizeLimit": "1Ti"}}}


def job(
    config: dict[str, Any], *, billions: float = 40, gpu: str = "80Gi", memory: str = "300Gi", **spec: Any
) -> dict[str, Any]:
    return {
        "image": "i",
        "workers": 1,
        "data": {"path": "/d"},
        "steps": 10,
        "model": {"parameters": int(billions * 10**9), "path": "/m"},
        "resources": {"gpus": {"count": 8, "memory": gpu}, "memory": memory},
        "config": {"bf16": {"enabled": True}, **config},
        **spec,
    }


def done_by_hand(given: dict[str, Any], proposal: Proposal) -> dict[str, Any]:
    """Return the spec of a job that a user edited by the words of the proposal."""
    spec = copy.deepcopy(given)
    for text in proposal.changes:
        words, _, volume = text.partition(" with spec.nvme")
        if words.startswith("spec.workers: "):
            spec["workers"] = int(words.removeprefix("spec.workers: "))
            continue
        if words != text:
            assert "nvme" not in spec, volume
            spec["nvme"] = {"size": "1Pi"}
        for key, value in json.loads(f"{{{words}}}").items():
            config = spec["config"]
            if key.startswith(("offload_", "stage3_")):
                config = config.setdefault("zero_optimization", {})
                config.pop("cpu_offload", None)  # only one of two names of one key is allowed
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return spec


def without_volume(found: Demand) -> list[TierDemand | int]:
    """Return the demand of each tier; of NVMe only the total, since a volume that is yet to be made has no
    size to compare.
    """
    return [tier.total_bytes if tier.tier is Tier.NVME else tier for tier in found.tiers]


def check(given: dict[str, Any], *, workers: int | None = None) -> Proposal | None:
    """Check that the proposal for a job is admitted and fits as it says; return it.

    `workers`: size of a job that began with spec.workers workers and was resized since.
    """
    spec = ZeroTrainingJobSpec.model_validate(given, by_alias=True)
    assert refusals(spec) == ()
    base = spec.workers if spec.elastic is not None else None
    proposal = plan_job(spec, workers=workers, base_workers=base).proposal
    if proposal is None:
        return None
    changed = ZeroTrainingJobSpec.model_validate(done_by_hand(given, proposal), by_alias=True)
    resized = changed if workers is None else changed.model_copy(update={"workers": base})
    assert refusals(resized) == (), proposal.changes
    grows = changed.workers != spec.workers
    again = plan_job(changed, workers=changed.workers if grows else workers, base_workers=base)
    assert again.demand is not None, again.message
    assert again.verdict is Fit.FITS, (proposal.changes, again.message)
    assert without_volume(again.demand) == without_volume(proposal.demand)
    assert pace(again.demand, RATES) == pace(proposal.demand, RATES)
    return proposal


ONE = {"train_micro_batch_size_per_gpu": 1}
ONE_BIT = {**ONE, "optimizer": {"type": "OneBitAdam"}, "activation_checkpointing": {}}
ON_HOST = {"zero_optimization": GROUP, "activation_checkpointing": {}}
SMALL_DRIVE: dict[str, Any] = {"nvme": {"size": "100Gi"}}
TWO = ("spec.workers: 2",)
GPT: dict[str, Any] = {"gpt": {"dModel": 4096, "layers": 32, "heads": 32, "context": 2048}}


def elastic(most: int) -> dict[str, Any]:
    return {"elastic": {"minWorkers": 1, "maxWorkers": most}, "checkpoint": SHARED, **SMALL_DRIVE}


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


CASES: list[tuple[str, dict[str, Any], tuple[str, ...] | None]] = [
    ("more workers", job({**ON_HOST, **ONE}, **SMALL_DRIVE), TWO),
    (
        "16 ranks cannot share 8 samples",
        job({**ON_HOST, **ONE, "train_batch_size": 8}, **SMALL_DRIVE),
        None,
    ),
    ("16 ranks can share 16", job({**ON_HOST, **ONE, "train_batch_size": 16}, **SMALL_DRIVE), TWO),
    (
        "the batch and the steps are said",
        job({**ON_HOST, "train_batch_size": 64, "gradient_accumulation_steps": 2}, **SMALL_DRIVE),
        TWO,
    ),
    (
        "all three sizes are said",
        job(
            {**ON_HOST, **ONE, "train_batch_size": 16, "gradient_accumulation_steps": 2},
            **SMALL_DRIVE,
        ),
        None,
    ),
    (
        "1-bit Adam stays at stage 1",
        job({**ONE_BIT, "zero_optimization": {"stage": 1}}, billions=7),
        None,
    ),
    ("1-bit Adam comes to stage 1", job(ONE_BIT, billions=4), ('"zero_optimization": {"stage": 1}',)),
    (
        "1-bit Adam comes no further",
        job(ONE_BIT, billions=5),
        ('"zero_optimization": {"stage": 1}', "spec.workers: 2"),
    ),
    (
        "no more than maxWorkers",
        job({**ON_HOST, **ONE, "gradient_accumulation_steps": 4}, **elastic(1)),
        None,
    ),
    (
        "an elastic job keeps 8 samples, which 16 ranks cannot share",
        job({**ON_HOST, **ONE}, **elastic(8)),
        None,
    ),
    ("and 32, which they can", job({**ON_HOST, **ONE, "gradient_accumulation_steps": 4}, **elastic(8)), TWO),
    (
        "not elastic beside all three sizes, until the job has started",
        job(
            {**ON_HOST, **ONE, "gradient_accumulation_steps": 4, "train_batch_size": 32},
            **elastic(8),
        ),
        None,
    ),
    ("checkpoints of one worker alone", job({**ON_HOST, **ONE}, checkpoint=OWN, **SMALL_DRIVE), None),
    ("the same for the life of a pod", job({**ON_HOST, **ONE}, checkpoint=CLAIMED, **SMALL_DRIVE), None),
    ("checkpoints that all see", job({**ON_HOST, **ONE}, checkpoint=SHARED, **SMALL_DRIVE), TWO),
    ("as many as there may be", job({**ON_HOST, **ONE}, workers=9_999, memory="30Gi", **SMALL_DRIVE), None),
    (
        "smaller micro-batches where the batch is said",
        job(
            {
                "train_batch_size": 128,
                "train_micro_batch_size_per_gpu": 16,
                "zero_optimization": {"stage": 3},
            },
            model=GPT,
        ),
        ('"train_micro_batch_size_per_gpu": 4',),
    ),
    (
        "smaller micro-batches of an elastic job",
        job(
            {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}},
            model=GPT,
            **elastic(8),
        ),
        ('"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4',),
    ),
    (
        "a folder that is not on the volume",
        job(
            {**ON_HOST, **ONE, "zero_optimization": {**GROUP, "offload_param": {"nvme_path": "/x"}}},
            nvme={"size": "8Ti", "mountPath": "/y"},
        ),
        ('"offload_optimizer": {"device": "nvme"}',),
    ),
    (
        "a folder that is not on the volume, where the states are",
        job(
            {**ON_HOST, **ONE, "zero_optimization": {"stage": 3, "offload_optimizer": ELSEWHERE}},
            nvme={"size": "8Ti"},
        ),
        TWO,
    ),
    (
        "a spill that may not grow so far",
        job({**ON_HOST, **ONE, "zero_optimization": {**GROUP, "spill": {"max_bytes": 10**10}}}),
        TWO,
    ),
    (
        "names of other times",
        job({**ONE, "zero_optimization": {"stage": 3, "cpu_offload": True}, "activation_checkpointing": {}}),
        ('"offload_optimizer": {"device": "nvme"} with spec.nvme',),
    ),
    (
        "masters that stay whole, as the file says",
        job(
            {**ONE, **ON_HOST, "bf16": {"enabled": True, "store_param_remainders": False}},
            memory="580Gi",
            **SMALL_DRIVE,
        ),
        ('"bf16": {"store_param_remainders": true}',),
    ),
    (
        "an update that has no remainders",
        job({**ONE, **ON_HOST, **adam(amsgrad=True)}, memory="500Gi", **SMALL_DRIVE),
        TWO,
    ),
    (
        "a node's second copy that cannot be made of 8 ranks",
        job(
            {**ONE, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 3}},
            billions=25,
            memory="2Ti",
        ),
        ('"activation_checkpointing": {}', '"offload_optimizer": {"device": "cpu"}'),
    ),
]


@pytest.mark.parametrize(("given", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_proposal_is_one_that_would_be_taken(
    given: dict[str, Any], changes: tuple[str, ...] | None
) -> None:
    found = check(given)
    assert (None if found is None else found.changes) == changes


BATCHES: list[dict[str, Any]] = [
    {"train_micro_batch_size_per_gpu": 2},
    {"train_batch_size": 64},
    {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 64, "gradient_accumulation_steps": 2},
    {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
]
OPTIMIZERS = ("AdamW", "OneBitAdam", "Lamb", "SGD", None)
SIZES: tuple[dict[str, Any], ...] = (
    {"billions": 3, "gpu": "24Gi", "memory": "200Gi"},
    {"billions": 30, "gpu": "40Gi", "memory": "500Gi"},
    {"billions": 70, "memory": "1Ti"},
)
KINDS: tuple[dict[str, Any], ...] = ({}, elastic(4), {"checkpoint": OWN})


@pytest.mark.parametrize("stage", range(4))
def test_so_is_every_other(stage: int) -> None:
    """All optimizers at this stage, over batches, models and kinds of jobs by turns."""
    turns = itertools.cycle(itertools.product(SIZES, KINDS))
    changes: set[str] = set()
    for batch, kind in itertools.product(BATCHES[stage % 2 :: 2], OPTIMIZERS):
        size, others = next(turns)
        if kind == "OneBitAdam" and stage > 1:
            continue
        config = {**batch, "zero_optimization": {"stage": stage}}
        if kind is not None:
            config["optimizer"] = {"type": kind}
        found = check(job(config, **size, **others))
        changes |= set() if found is None else {change.split(":")[0] for change in found.changes}
    higher = {'"zero_optimization"'} if stage < 3 else set()
    assert changes >= {"spec.workers", '"offload_optimizer"', '"activation_checkpointing"', *higher}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batch", BATCHES[2:], ids=str)
def test_a_job_that_was_resized_keeps_its_samples(batch: dict[str, Any], workers: int) -> None:
    """The values written into the file count for the size that the job began with."""
    samples = 4 * batch.get("train_batch_size", 64)
    if "train_batch_size" in batch:
        batch = {**batch, "train_batch_size": samples}
    given = job(
        {**batch, "zero_optimization": {"stage": 1}},
        workers=4,
        model=GPT,
        gpu="24Gi",
        **elastic(16),
    )
    found = check(given, workers=workers)
    assert found is not None
    assert found.demand.workload.config.batch.train_batch_size == samples


def test_more_workers_cost_what_they_cost() -> None:
    """A step of twice as many ranks has twice as many samples, unless the file gives the batch."""
    rows = [(dict[str, Any](ONE), 16), ({**ONE, "train_batch_size": 32}, 32)]
    for batch, samples in rows:
        found = check(job({**ON_HOST, **batch}, **SMALL_DRIVE))
        assert found is not None
        assert found.changes == TWO
        timed = pace(found.demand, RATES)
        assert timed is not None
        assert timed.tokens == samples * found.demand.workload.shape.context
