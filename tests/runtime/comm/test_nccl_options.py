"""Streams of NCCL have a high priority in every group, or kernels that compute would delay a collective."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerotrain.runtime.comm import group, start, subgroup

pytestmark = pytest.mark.unit

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend that the backend is NCCL, and return the options of all groups that are made."""
    options: list[Any] = []

    def make(*_args: Any, pg_options: Any = None, **_settings: Any) -> object:
        options.append(pg_options)
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for module in (group, start):
        monkeypatch.setattr(module, "pick_device", lambda: torch.device("cuda", 0))
    return options


def check(options: list[Any], count: int) -> None:
    assert [(each.is_high_priority_stream, each._timeout) for each in options] == [(True, TIMEOUT)] * count


def test_the_group_that_a_script_starts_has_it(made: list[Any]) -> None:
    start.init_distributed(rank=0, world_size=1, timeout=TIMEOUT)
    check(made, 1)


def test_groups_within_and_between_nodes_have_it(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgroup, "_LASTING", {})
    for world_size in (4, 2):
        comm: Any = SimpleNamespace(world_size=world_size, timeout=TIMEOUT)
        assert subgroup._make([0, 1], comm, is_member=True) is not None
    check(made, 2)


def test_other_backends_have_no_such_options() -> None:
    assert group.nccl_options("gloo", TIMEOUT) is None
