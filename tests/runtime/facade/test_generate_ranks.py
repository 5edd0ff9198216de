"""`generate` when ranks end after different numbers of tokens.

At stage 3 the ranks stay in step automatically, or an error names the argument.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.hf_folders import model_of, token_ids
from tests.support.ranks import run_ranks
from tests.support.training import world
from zerotrain.runtime.comm.group import CommError

pytestmark = pytest.mark.ranks

TOKENS = (3, 9)
"""New tokens by rank."""


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def generated(model: Any, **options: Any) -> list[list[int]]:
    ids = token_ids(tokens=6)
    with torch.no_grad():
        found: list[list[int]] = model.generate(
            ids, max_new_tokens=TOKENS[world()[0]], do_sample=False, pad_token_id=0, **options
        ).tolist()
    return found


class Wrapper(nn.Module):
    """A model that generates with the language model inside of it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids)


def uneven(stage: int, is_frozen: bool) -> dict[str, Any]:
    """Return this rank's tokens by way of the call, beside the plain model's."""
    model = model_of("llama").requires_grad_(not is_frozen)
    expected = generated(model_of("llama"))
    engine, *_ = zt.initialize(model=model, config=config(stage))
    engine.eval()
    found = {
        "engine": generated(engine),
        "model": generated(model),
        "asked": generated(model, synced_gpus=True),
        "left open": generated(model, synced_gpus=None),
    }
    with zt.full_parameters(model):
        if world()[0] == 0:
            found["alone"] = generated(model)
    if not is_frozen:
        engine.train()
        ids = token_ids()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    assert ("generate" in vars(model)) is (stage == 3)
    engine.close()
    assert "generate" not in vars(model)
    return {"expected": expected, **found}


def inner(stage: int) -> dict[str, Any]:
    """Return the same for a language model inside of the module that the engine has."""
    model = Wrapper(model_of("llama"))
    engine, *_ = zt.initialize(model=model, config=config(stage))
    assert ("generate" in vars(model.inner)) is (stage == 3)
    assert "generate" not in vars(model)
    with zt.full_parameters(model):
        found = generated(model.inner, synced_gpus=True)
    engine.close()
    return {"expected": generated(model_of("llama")), "inner": found}


def every_case() -> list[dict[str, Any]]:
    cases = [uneven(stage, is_frozen) for stage in (2, 3) for is_frozen in (False, True)]
    return [*cases, inner(3)]


def test_uneven_ranks_generate_the_plain_models_tokens() -> None:
    for per_rank in run_ranks(2, every_case):
        for case, found in enumerate(per_rank):
            expected = found.pop("expected")
            for way, tokens in found.items():
                # A rank that has ended continues with padding to stay in step.
                assert [row[: len(expected[0])] for row in tokens] == expected, (case, way)


def parted() -> str:
    os.environ["ZEROTRAIN_WATCHDOG_SECONDS"] = "10"
    engine, *_ = zt.initialize(model=model_of("llama"), config=config(3))
    engine.eval()
    try:
        generated(engine, synced_gpus=False)
        engine.train()
        ids = token_ids()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("each_transport")
def test_the_error_names_the_argument() -> None:
    for text in run_ranks(2, parted):
        assert "pass synced_gpus=True to generate()" in text


def one_rank() -> bool:
    model = model_of("llama")
    engine, *_ = zt.initialize(model=model, config=config(3))
    expected = generated(model_of("llama"))
    found = generated(engine)
    engine.close()
    return found == expected and "generate" not in vars(model)


def test_one_rank_is_left_alone() -> None:
    assert run_ranks(1, one_rank) == [True]
