"""A background save copies a GPU's state window by window, and waits for one while the next is on its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerotrain.runtime.checkpoint import staging
from zerotrain.runtime.checkpoint.staging import Staging
from zerotrain.runtime.comm.streams import HostCopy
from zerotrain.runtime.zero import state
from zerotrain.runtime.zero.state import TensorStream

pytestmark = pytest.mark.unit

WINDOW = 8


def test_windows_arrive_while_others_are_copied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    made: list[HostCopy] = []
    init, read = HostCopy.__init__, HostCopy.read

    def note_start(copy: HostCopy, tensor: torch.Tensor) -> None:
        init(copy, tensor)
        made.append(copy)
        notes.append(f"start {len(made)}")

    def note_read(copy: HostCopy) -> torch.Tensor:
        notes.append(f"wait {made.index(copy) + 1}")
        return read(copy)

    monkeypatch.setattr(HostCopy, "__init__", note_start)
    monkeypatch.setattr(HostCopy, "read", note_read)
    monkeypatch.setattr(staging, "is_host", lambda _device: False)
    monkeypatch.setattr(state, "WINDOW_NUMEL", WINDOW)
    masters, moments = torch.arange(20.0), torch.arange(5.0).to(torch.bfloat16)
    tensors: dict[str, Any] = {"a": TensorStream(masters), "b": TensorStream(moments)}
    found: dict[str, Any] = Staging().copies(tensors)
    for key, wanted in (("a", masters), ("b", moments)):
        assert found[key].dtype is wanted.dtype
        assert torch.equal(found[key], wanted)
    assert notes == ["start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "wait 4"]


def test_what_is_in_host_memory_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopy, "__init__", lambda *_: pytest.fail("one more copy"))
    found: Any = Staging().copies({"a": TensorStream(torch.arange(20.0))})["a"]
    assert torch.equal(found, torch.arange(20.0))
