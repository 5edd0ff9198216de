"""Operations of an engine's steps, and the MFU that metrics and records make of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from zerotrain.contract.history import Point
from zerotrain.contract.planner import Adapters, flops_of, gpt_shape, shape_of_config
from zerotrain.contract.train_spec import GptSpec
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.channel import RankChannel
from zerotrain.runtime.models.gpt import Gpt
from zerotrain.runtime.train.compute_work import ComputeWork
from zerotrain.runtime.train.report import Reporter, StepReport

pytestmark = pytest.mark.ranks

SPEC = GptSpec(d_model=32, layers=3, heads=4, context=16)
PEAK_TFLOPS = 0.5
WORLD_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration in transformers' words."""

    num_hidden_layers: int = 3
    hidden_size: int = 32
    num_attention_heads: int = 4
    head_dim: int = 16
    num_experts: int = 1
    is_encoder_decoder: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Small(nn.Module):
    """A table, a matrix and a head, which may be the table."""

    def __init__(self, config: Config, *, tied: bool = False) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(64, 32)
        self.body = nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.table.weight


def work(model: nn.Module, **config: Any) -> ComputeWork:
    engine, *_ = zt.initialize(
        model=model, config={"train_batch_size": 4, "zero_optimization": {"stage": 3}, **config}
    )
    found = ComputeWork.of(engine)
    engine.close()
    return found


def counted() -> dict[str, Any]:
    frozen = Small(Config())
    frozen.body.requires_grad_(False)
    return {
        "gpt": work(Gpt(SPEC), peak_tflops=PEAK_TFLOPS),
        "plain": work(Small(Config())),
        "tied": work(Small(Config(), tied=True)),
        "frozen": work(frozen),
        "experts": work(Small(replace(Config(), num_experts=8))),
        "two sides": work(Small(replace(Config(), is_encoder_decoder=True))),
    }


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def with_adapters() -> ComputeWork:
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return work(peft.get_peft_model(model, lora))


def reported() -> dict[str, Any]:
    launch = LaunchSpec(
        job="demo", job_uid="u", attempt=1, master_addr="x", world_size=1, node_rank=0, config_path=Path("c")
    )
    reporter = Reporter.start(launch, RankEnv(rank=0, local_rank=0, local_world_size=1), RankChannel(None))
    reporter.is_quiet = True
    engine, *_ = zt.initialize(model=Gpt(SPEC), config={"train_batch_size": 2, "peak_tflops": PEAK_TFLOPS})
    reporter.ready(engine)
    history: list[Point] = []
    reporter.history = type("Kept", (), {"add": staticmethod(history.append)})()
    ids = torch.zeros(2, SPEC.context + 1, dtype=torch.int64)
    engine.backward(engine(ids))
    result = engine.step()
    step = StepReport(
        result=result, loss=1.0, seconds=0.25, data_seconds=None, tokens=2 * SPEC.context, samples=2
    )
    reporter.step(step, engine=engine)
    read = reporter.metrics.registry.get_sample_value
    found = {
        name: read(f"zerotrain_{name}", {"job_name": "demo", "rank": "0"})
        for name in ("step_flops", "mfu_ratio")
    }
    engine.close()
    return {**found, "progress": reporter.progress, "point": history[0]}


def test_the_parameters_that_tokens_are_multiplied_with() -> None:
    (found, _) = run_ranks(WORLD_SIZE, counted)
    assert found["gpt"].model == flops_of(gpt_shape(SPEC, source=""))
    assert found["gpt"].peak == PEAK_TFLOPS * 1e12 * WORLD_SIZE
    plain = found["plain"].model
    assert (plain.trained, plain.frozen, plain.attention_width) == (32 * 32 + 32 * 64, 0, 3 * 4 * 16)
    assert found["tied"].model == plain
    assert (found["frozen"].model.trained, found["frozen"].model.frozen) == (32 * 64, 32 * 32)
    assert found["experts"].model is found["two sides"].model is None
    assert found["plain"].peak is None  # of a CPU


def test_a_model_of_peft_has_the_operations_that_a_plan_counts() -> None:
    (found, _) = run_ranks(WORLD_SIZE, with_adapters)
    shape = replace(shape_of_config(LLAMA), adapters=Adapters(rank=4, targets=("q_proj", "down_proj")))
    assert found.model == flops_of(shape)
    assert found.model.trained == 2 * 4 * ((32 + 32) + (48 + 32))


def test_a_step_is_reported_with_its_operations_and_their_part_of_the_peak() -> None:
    (found,) = run_ranks(1, reported)
    flops = 2 * SPEC.context * flops_of(gpt_shape(SPEC, source="")).training(SPEC.context)
    mfu = flops / 0.25 / (PEAK_TFLOPS * 1e12)
    assert found["step_flops"] == pytest.approx(flops)
    assert found["mfu_ratio"] == pytest.approx(mfu)
    assert (found["progress"].step_flops, found["progress"].mfu) == pytest.approx((flops, mfu))
    point = found["point"]
    twice = point.merged(point)
    assert twice.flops / twice.peak_flops == pytest.approx(mfu)
