"""Operations on unread tensors give torch's values, in any interval, and read no more than they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zerotrain.runtime.construct.expressions import Held, Leaf, equal
from zerotrain.runtime.construct.unread import UnreadTensor

pytestmark = pytest.mark.unit

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "itself": lambda a, b: a[...],
    "cast": lambda a, b: a.to(device="cpu", dtype=torch.bfloat16),
    "cast twice": lambda a, b: a.half().float(),
    "stack": lambda a, b: torch.stack([a, b], dim=0),
    "stack inside": lambda a, b: torch.stack([a, b, a], dim=1),
    "join": lambda a, b: torch.cat([a, b], dim=0),
    "join inside": lambda a, b: torch.cat([a, b, a], dim=-1),
    "join of two dtypes": lambda a, b: torch.cat([a, b.half()]),
    "fused experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "chunks": lambda a, b: [each.contiguous() for each in torch.chunk(a, 2, dim=0)],
    "chunks inside": lambda a, b: list(torch.chunk(a, 4, dim=1)),
    "split": lambda a, b: list(torch.split(a, [1, 3, 2], dim=1)),
    "slice": lambda a, b: a[1:3, 2:],
    "slice with a step": lambda a, b: a[::2],
    "select": lambda a, b: a[-1],
    "unbind": lambda a, b: list(a.unbind(1)),
    "transpose": lambda a, b: a.t().contiguous(),
    "rotary": lambda a, b: a.view(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "cut of a transpose": lambda a, b: torch.chunk(a.transpose(0, 1), 3, dim=1)[1],
    "squeeze": lambda a, b: a.unsqueeze(1).squeeze(1).unsqueeze(-1),
    "sum": lambda a, b: (a + b * 2).sum(dim=0),
    "sorted": lambda a, b: list(a.sort(dim=1)),
    "bytes": lambda a, b: a.view(torch.int32),
    "with a real one": lambda a, b: torch.cat([a, torch.ones(1, 6)]),
    "number": lambda a, b: torch.tensor(a.max().item()),
    "by values": lambda a, b: a[a > 0],
    "written": lambda a, b: a.clone().mul_(2).add_(b),
}


def results(operation: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    found = operation(*tensors)
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_interval_has_torchs_values(name: str) -> None:
    torch.manual_seed(0)
    real = torch.randn(4, 6), torch.randn(4, 6)
    expected = results(OPERATIONS[name], *real)
    unread = [UnreadTensor(Held(each.clone())) for each in real]
    found = results(OPERATIONS[name], *unread)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        expression = one.expression if isinstance(one, UnreadTensor) else Held(one)
        assert torch.equal(expression.whole(), other)
        for start in range(other.numel()):
            for stop in range(start, other.numel() + 1):
                target = torch.empty(stop - start, dtype=torch.float32)
                expression.read(start, target)
                assert torch.equal(target, other.reshape(-1)[start:stop].float())


class Counted(Leaf):
    """Numbers from 0, and how many were read."""

    count = 0

    def _read_range(self, start: int, target: torch.Tensor) -> None:
        self.count += target.numel()
        target.copy_(torch.arange(start, start + target.numel()))


@pytest.mark.parametrize("name", ["cast", "join inside", "fused experts", "chunks inside", "stack inside"])
def test_an_interval_is_read_alone(name: str) -> None:
    source = Counted((4, 6), torch.float32)
    found = results(OPERATIONS[name], UnreadTensor(source), UnreadTensor(source))[0]
    assert isinstance(found, UnreadTensor)
    assert source.count == 0
    found.expression.read(1, torch.empty(3))
    assert source.count == 3


def test_equality() -> None:
    values = torch.randn(5, 3)
    other = values.clone()
    other[4, 2] += 1
    assert equal(Held(values), Held(values.clone()))
    assert not equal(Held(values), Held(other))
    assert not equal(Held(values), Held(values.view(3, 5)))
    turned = UnreadTensor(Held(values)).t()
    assert isinstance(turned, UnreadTensor)
    assert equal(turned.expression, Held(values.t().contiguous()))
