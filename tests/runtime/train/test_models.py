"""The byte-level GPT computes the documented function, and its presets have the sizes of their names."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from zerotrain.contract.presets import PRESETS
from zerotrain.contract.train_spec import GptSpec, ModelSpec, TrainSpec
from zerotrain.runtime.models import Gpt, build_model
from zerotrain.runtime.models.gpt import Attention

pytestmark = pytest.mark.unit


SMALL = GptSpec(d_model=16, layers=2, heads=4, context=8)
IDS = torch.arange(27).view(3, 9) * 7 % 256


def small(**options: bool) -> Gpt:
    torch.manual_seed(3)
    return Gpt(SMALL, **options)


def num_parameters(spec: GptSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Gpt(spec).parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_size_of_its_name(name: str) -> None:
    size = name.removeprefix("gpt-")
    expected = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert expected * 0.98 <= num_parameters(PRESETS[name]) <= expected * 1.15


def test_loss_is_the_cross_entropy_of_the_next_byte() -> None:
    model = small()
    scores = model.logits(IDS[:, :-1]).detach().log_softmax(-1)
    expected = -sum(
        float(scores[row, position, IDS[row, position + 1]]) for row in range(3) for position in range(8)
    )
    assert model(IDS).item() == pytest.approx(expected / 24, rel=1e-5)


def test_untrained_loss_is_that_of_a_uniform_guess() -> None:
    assert small()(IDS).item() == pytest.approx(math.log(256), abs=0.05)


def test_no_position_sees_the_future() -> None:
    model = small()
    changed = IDS[:, :8].clone()
    changed[:, 5] += 1
    before, after = model.logits(IDS[:, :8]), model.logits(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_attention_equals_the_plain_formula() -> None:
    attention = Attention(16, 4)
    x = torch.randn(2, 8, 16)
    queries, keys, values = (part.view(2, 8, 4, 4).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(4)
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
    mixed = (functional.softmax(scores, -1) @ values).transpose(1, 2).reshape(2, 8, 16)
    torch.testing.assert_close(attention(x), attention.out(mixed))


def test_head_is_tied_unless_asked_otherwise() -> None:
    tied, free = small(), small(tied_head=False)
    assert tied.head.weight is tied.embed.weight
    assert free.head.weight is not free.embed.weight


def test_recomputing_activations_changes_nothing() -> None:
    plain, recomputed = small(), small(checkpoint_activations=True)
    for model in (plain, recomputed):
        model(IDS).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_too_long_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="a sample has 9 tokens but the model's context is 8"):
        small()(torch.zeros(1, 10, dtype=torch.int64))


def test_spec_reaches_the_model() -> None:
    spec = TrainSpec(model=ModelSpec(gpt=SMALL), data_path="x", steps=1, context=4)
    built = build_model(spec, checkpoint_activations=True)
    assert isinstance(built.module, Gpt)
    assert (built.context, built.vocabulary, built.module.checkpoint_activations) == (4, 256, True)
