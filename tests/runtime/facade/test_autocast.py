"""`torch_autocast` equals plain training under torch.autocast, with a loss scale if it computes in fp16."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import zerotrain.runtime as zt
from tests.support.ranks import run_ranks
from tests.support.tiny_models import token_batches
from tests.support.training import (
    EPS,
    GLOBAL_BATCH,
    LR,
    WEIGHT_DECAY,
    Case,
    Outcome,
    largest_difference,
    micro_batches,
    train_with_engine,
    whole_parameters,
)
from zerotrain.contract.config import ConfigError

pytestmark = pytest.mark.ranks


SCALE = 1024.0


@dataclass(frozen=True, kw_only=True)
class Autocast(Case):
    to: str = "bf16"

    def config(self, world_size: int) -> dict[str, object]:
        block = {"enabled": True, "dtype": self.to}
        return {**super().config(world_size), "torch_autocast": block, "fp16": {"loss_scale": SCALE}}


def reference(case: Autocast, world_size: int) -> Outcome:
    model, dtype = case.model(), {"bf16": torch.bfloat16, "float16": torch.float16}[case.to]
    scale = SCALE if case.to == "float16" else 1.0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, foreach=False, fused=False
    )
    losses = []
    for batch in token_batches(case.steps, size=GLOBAL_BATCH):
        optimizer.zero_grad()
        total = 0.0
        for part in micro_batches(batch, world_size=world_size, accumulation=1)[0]:
            with torch.autocast("cpu", dtype):
                loss = model(*part)
            (loss * scale / world_size).backward()
            total += loss.item()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(scale)
        optimizer.step()
        losses.append(total / world_size)
    return Outcome(losses, [], whole_parameters(model))


CASES = (Autocast(stage=3), Autocast(stage=1, to="float16"))


def train_all(cases: tuple[Autocast, ...]) -> list[Outcome]:
    return [train_with_engine(case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_equals_torchs_autocast(world_size: int) -> None:
    for case, outcome in zip(CASES, run_ranks(world_size, train_all, CASES)[0], strict=True):
        expected = reference(case, world_size)
        if world_size == 1:
            assert outcome.losses == expected.losses, case
            assert largest_difference(outcome, expected) == 0.0, case
        else:
            assert outcome.losses == pytest.approx(expected.losses, abs=5e-3), case


def test_it_excludes_the_other_precisions() -> None:
    config = {**Autocast().config(1), "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"torch_autocast\.enabled: must not be on together with bf16"):
        zt.initialize(model=Case().model(), config=config)
