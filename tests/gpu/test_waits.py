"""Waits of the host are counted where they happen, whoever reports them, and apart if they are over."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

from tests.gpu.waits import REPORT, Waits, host_waits
from zerotrain.runtime.comm.streams import HostCopy

pytestmark = pytest.mark.unit


class Wait:
    """An event or a stream, whose wait torch reports as it reports one for a stream."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        warnings.warn(REPORT, stacklevel=1)


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that there is a GPU, and return the modes that are set."""
    found: list[str] = []

    def set_mode(mode: str) -> None:
        found.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (Wait,), {}))
    monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (Wait,), {}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return found


def make(kind: str, **values: Any) -> Any:
    made = getattr(torch.cuda, kind)()
    vars(made).update(values)
    return made


def test_each_kind_of_wait_counts_once_with_its_line() -> None:
    def step() -> None:
        make("Event").synchronize()
        make("Stream").synchronize()
        for _ in range(2):
            torch.cuda.synchronize()
        warnings.warn(REPORT, stacklevel=1)  # as `item` does

    waits = host_waits(step)
    assert sorted(waits.real.values()) == [1, 1, 1, 2]
    assert not waits.passed
    first = min(waits.real)
    assert first.startswith("tests/gpu/test_waits.py:") or "/tests/gpu/test_waits.py:" in first


def test_a_wait_for_what_has_passed_is_apart() -> None:
    waits = host_waits(lambda: make("Event", is_over=True).synchronize())
    assert not waits.real
    assert sum(waits.passed.values()) == 1


def test_a_wait_names_its_caller() -> None:
    copy = HostCopy(torch.ones(1))
    copy._event = make("Event")
    (place,) = host_waits(lambda: copy.read()).real
    inner, outer = place.split(" < ")
    assert inner.startswith("runtime/comm/streams.py:")
    assert "test_waits.py:" in outer


def test_a_wait_of_another_thread_has_its_name() -> None:
    def step() -> None:
        thread = threading.Thread(target=lambda: torch.cuda.synchronize(), name="updater")
        thread.start()
        thread.join()

    assert [place.endswith("(updater)") for place in host_waits(step).real] == [True]


def test_everything_is_as_before_afterwards(modes: list[str]) -> None:
    before = torch.cuda.synchronize

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        host_waits(fail)
    assert modes == ["warn", "default"]
    assert torch.cuda.synchronize is before
    assert host_waits(lambda: None) == Waits()
