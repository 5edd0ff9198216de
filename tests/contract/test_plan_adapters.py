"""The planner's view of a model with adapters equals the units that the engine makes of PEFT's model."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.test_plan_shapes import DECODER
from tests.support.jobs import ABSENT, make_job
from zerotrain.contract.config import load, resolve
from zerotrain.contract.memory import memory_inputs, small_parameters
from zerotrain.contract.planner import read_shape
from zerotrain.operator.api.plan_inputs import workload_of
from zerotrain.runtime.zero.plan import SmallParameters, plan_layout

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")], ids=["all", "two"])
@pytest.mark.parametrize("threshold", [0, 600, 20_000])
def test_units_are_the_engines(tmp_path: Path, targets: tuple[str, ...], threshold: int) -> None:
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    config = transformers.LlamaConfig(**DECODER)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    job = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
    engine = resolve(load({**job, "train_micro_batch_size_per_gpu": 2}), world_size=2)
    largest, budget = small_parameters(engine)
    with torch.device("meta"):
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config),
            peft.LoraConfig(r=4, target_modules=list(targets) or "all-linear", task_type="CAUSAL_LM"),
        )
    layout = plan_layout(
        model, world_size=2, compute_dtype="fp32", small=SmallParameters(numel=largest, budget=budget)
    )
    lora = {"rank": 4, **({"targets": list(targets)} if targets else {})}
    spec = make_job(
        {
            "spec.model": ABSENT,
            "spec.data": ABSENT,
            "spec.config": job,
            "spec.ranksPerWorker": 1,
            "spec.finetune": {
                "model": "/models/a", "method": "lora", "lora": lora, "data": "/data/a.jsonl",
                "learningRate": 1e-4, "batchSize": 2, "maxLength": 64,
            },
        }
    ).spec  # fmt: skip
    workload = workload_of(spec, shape=read_shape(tmp_path / "config.json", context=64))
    units = workload.shape.units(engine, on_host=False)
    assert Counter((each.trainable, each.stays_whole, each.numel) for each in units) == Counter(
        (each.trainable, each.name.startswith("(small)"), each.numel) for each in layout.units
    )
    inputs = memory_inputs(engine, units)
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert trained <= inputs.trainable_numel < trained + 4 * 2 * 2048
    assert workload.config.batch.micro_batch_size == 2
