"""A copy of a GPU's values to the host, with a tensor that only says that it is on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fake_streams import CUDA, FakeCuda
from zerotrain.runtime.comm.streams import HostCopy

pytestmark = pytest.mark.unit


class OnGpu(torch.Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


def test_a_copy_of_a_loss_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would live until the copy is read, beside the update and all that follows it."""
    FakeCuda().install(monkeypatch)
    empty = torch.empty

    def without_locked_pages(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_locked_pages)
    loss = (2 * torch.ones(2, requires_grad=True)).sum()
    copy = HostCopy(loss.as_subclass(OnGpu))
    assert copy._event is not None
    assert float(copy._values.detach()) == 4.0
    assert not copy._values.requires_grad
