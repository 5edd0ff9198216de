"""Random numbers continue after a restart, on whichever GPU of its host a rank computes.

CUDA is a stand-in.
"""

from __future__ import annotations

import pytest
import torch

from zerotrain.runtime.checkpoint import rng

pytestmark = pytest.mark.unit


class Gpus:
    """A generator per device; the current one is the rank's."""

    def __init__(self, count: int, current: int) -> None:
        self.states = [torch.full((4,), index, dtype=torch.uint8) for index in range(count)]
        self.current = current

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device])
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


def test_the_ranks_own_generator_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Gpus(8, current=5), Gpus(2, current=1)
    before.states[5] = torch.tensor([9, 9, 9, 9], dtype=torch.uint8)
    before.install(monkeypatch)
    captured = rng.capture()
    after.install(monkeypatch)
    rng.restore(*captured)
    assert [state.tolist() for state in after.states] == [[0, 0, 0, 0], [9, 9, 9, 9]]


def test_a_state_of_cpus_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, gpus = rng.capture(), Gpus(2, current=1)
    gpus.install(monkeypatch)
    rng.restore(*captured)
    assert [state.tolist() for state in gpus.states] == [[0] * 4, [1] * 4]
