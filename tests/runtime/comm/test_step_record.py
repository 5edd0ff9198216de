"""The record that ranks exchange at a step is made on the host, and the hosts exchange it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerotrain.runtime.checkpoint.group import ranks_of
from zerotrain.runtime.comm import group
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.timing import Pending

pytestmark = pytest.mark.unit


class OneOfTwo(Comm):
    """A rank whose gathers return its own shard twice."""

    def __init__(self) -> None:
        self.device, self.world_size, self._watchdog = torch.device("cpu"), 2, None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        full.view(2, -1).copy_(shard)
        return Pending.done()


def test_the_programs_default_device_is_not_the_records() -> None:
    comm: Any = OneOfTwo()
    torch.set_default_device("meta")
    try:
        assert comm.gather_record([1.0, 2.5]) == [[1.0, 2.5]] * 2
    finally:
        torch.set_default_device(None)


class OnGpu(Comm):
    """One of two ranks with GPUs, whose hosts have a group of their own."""

    def __init__(self) -> None:
        self.device, self.world_size, self.rank = torch.device("cuda", 0), 2, 0
        self.group, self._hosts, self._members, self._watchdog = "NCCL", None, None, None

    def issue(self, start: Any, full: torch.Tensor, mine: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        assert {full.device.type, mine.device.type} == {"cpu"}
        assert options == {"group": "gloo", "async_op": True}
        full.view(2, -1).copy_(mine)

    def account(self, *given: Any, on_host: bool = False, **_: Any) -> Pending:
        assert on_host
        return Pending.done()


def test_no_record_passes_through_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = OnGpu()
    made: list[Any] = []

    def noted(**given: Any) -> Any:
        made.append(given.get("backend"))
        return made[-1]

    monkeypatch.setattr(dist, "get_backend", lambda group="nccl": group)
    monkeypatch.setattr(dist, "new_group", noted)
    monkeypatch.setattr(group, "nccl_options", lambda *_: None)
    comm._make_groups(timedelta(seconds=1), is_first=True)
    assert made == [None, "gloo"]
    assert comm.gather_record([1.0, 2.5]) == [[1.0, 2.5]] * 2


def test_what_a_save_agrees_on_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's values have no meaning after a failure, and nothing would say so."""
    comm: Any = OnGpu()
    comm.hosts = "gloo"
    sent: list[tuple[str, str]] = []

    def gather(records: list[torch.Tensor], mine: torch.Tensor, *, group: str, async_op: bool) -> Any:
        sent.append((group, mine.device.type))
        for record in records:
            record.copy_(mine)
        return SimpleNamespace(wait=lambda: None)

    for name, value in {"get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda _group, value=value: value)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.lower())
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(comm, "watch", lambda work, _name, *, on_host: work if on_host else None)
    assert ranks_of(comm).gather([3, 4]) == [(3, 4)] * 2
    assert sent == [("gloo", "cpu")]
