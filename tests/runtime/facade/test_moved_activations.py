"""Inputs of recomputed parts leave a GPU and come back beside the computation, which waits as late as it can.

The parts compute on the CPU, on streams that are not there (`fake_streams.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain.runtime as zt
from tests.support.fake_streams import MAIN, SIDE, FakeCuda
from zerotrain.runtime.activation import kept
from zerotrain.runtime.activation.host_copies import HostCopies
from zerotrain.runtime.activation.settings import Settings, adopt

pytestmark = pytest.mark.unit

PARTS = 4
CPU = torch.device("cpu")


class Timeline:
    """Streams of a GPU in place of the CPU's, with a note of each copy and of each part's runs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cuda = FakeCuda()
        self.cuda.install(patch)
        self.copies = HostCopies(CPU)
        self.leaving: list[weakref.ref[torch.Tensor]] = []
        copy = torch.Tensor.copy_
        patch.setattr(kept, "copies_of", lambda _device: self.copies)

        def noted(into: torch.Tensor, source: torch.Tensor, **settings: Any) -> torch.Tensor:
            if self.cuda.current.name == SIDE:
                assert settings == {"non_blocking": True}
                self.cuda.note("copy", "")
            return copy(into, source)

        patch.setattr(torch.Tensor, "copy_", noted)

    def part(self, index: int, layer: nn.Module) -> Any:
        def run(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            self.cuda.note("run", str(index))
            out: torch.Tensor = torch.tanh(layer(hidden)) + other
            return out

        return run


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    yield
    adopt(Settings())


def trained(wrap: Any) -> list[torch.Tensor]:
    """Return the gradients of a chain of parts of two inputs; `wrap(index, layer)` makes a part."""
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(PARTS)]
    inputs = torch.randn(4, 8, requires_grad=True)
    hidden, other = inputs * 2.0, inputs * 3.0
    for index, layer in enumerate(layers):
        hidden = zt.checkpoint_activations(wrap(index, layer), hidden, other)
    hidden.square().sum().backward()  # type: ignore[no-untyped-call]
    found = [inputs.grad, *(layer.weight.grad for layer in layers)]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("contiguous", [False, True])
def test_copies_run_beside_the_parts(monkeypatch: pytest.MonkeyPatch, contiguous: bool) -> None:
    plain = trained(lambda _, layer: lambda hidden, other: torch.tanh(layer(hidden)) + other)
    zt.configure_checkpointing(checkpoint_in_cpu=True, contiguous_checkpointing=contiguous)
    timeline = Timeline(monkeypatch)
    found = trained(timeline.part)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))

    copies, cuda = timeline.cuda.found("copy"), timeline.cuda
    assert [note.stream for note in copies] == [SIDE] * (4 * PARTS), "each input goes and comes once"
    runs = [cuda.found("run", str(index)) for index in range(PARTS)]
    assert [[note.stream for note in both] for both in runs] == [[MAIN, MAIN]] * PARTS
    for index, (forward, again) in enumerate(runs):
        gone, back = 2 * (index + 1), 2 * (2 * PARTS - index)
        assert forward.seen.get(SIDE, 0) == gone - 2, "those of the parts before have left"
        assert again.seen[SIDE] == back
        if index:
            next_back = copies[back]
            assert next_back.seen.get(MAIN, 0) < again.place, "the part before comes back beside this one"
            assert cuda.notes.index(next_back) < cuda.notes.index(again)


def test_parts_without_a_backward_pass_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    zt.configure_checkpointing(checkpoint_in_cpu=True)
    timeline = Timeline(monkeypatch)
    layers = [nn.Linear(8, 8) for _ in range(2)]
    unused, used = [timeline.part(index, layer) for index, layer in enumerate(layers)]
    start = torch.randn(4, 8, requires_grad=True) * 1.0
    forgotten = zt.checkpoint_activations(unused, start, start)
    hidden = zt.checkpoint_activations(used, start, start)
    del forgotten
    hidden.sum().backward()
    assert len(timeline.cuda.found("copy")) == 2 * 2 + 2


def test_an_input_may_be_written_and_freed_after_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    zt.configure_checkpointing(checkpoint_in_cpu=True)
    timeline = Timeline(monkeypatch)
    main, alive = timeline.cuda.main, list[bool]()

    def part(hidden: torch.Tensor) -> torch.Tensor:
        assert main.seen.get(SIDE, 0) == 0
        result = hidden * 2.0
        del hidden
        alive.append(kept_input() is not None)
        return result

    hidden = torch.ones(3, requires_grad=True) * 1.0
    kept_input = weakref.ref(hidden)
    arguments = [hidden]
    del hidden
    zt.checkpoint_activations(part, arguments.pop())
    assert alive == [True]
    assert kept_input() is None
    assert main.seen[SIDE] == 1
