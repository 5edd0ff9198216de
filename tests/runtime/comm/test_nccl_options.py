"""Streams of NCCL have a high priority in every group, or kernels that compute would delay a collective, and
groups that only their members make are no part of the communicator of all ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerotrain.runtime.comm import group, start, subgroup
from zerotrain.runtime.train import rendezvous

pytestmark = pytest.mark.unit

TIMEOUT = timedelta(seconds=60)
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend that the backend is NCCL, and return the options of all groups that are made."""
    options: list[Any] = []
    whole = SimpleNamespace(bound_device_id=DEVICE)

    def make(
        *_args: Any, pg_options: Any = None, use_local_synchronization: bool = False, **_settings: Any
    ) -> object:
        # torch splits the communicator of a bound default group, which every rank of it must call.
        assert not (use_local_synchronization and whole.bound_device_id)
        options.append(pg_options)
        return object()

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=whole))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for module in (group, start, rendezvous):
        monkeypatch.setattr(module, "pick_device", lambda: DEVICE)
    return options


def check(options: list[Any], count: int, timeout: timedelta = TIMEOUT) -> None:
    assert [(each.is_high_priority_stream, each._timeout) for each in options] == [(True, timeout)] * count


def test_the_group_that_a_script_starts_has_it(made: list[Any]) -> None:
    start.init_distributed(rank=0, world_size=1, timeout=TIMEOUT)
    check(made, 1)


def test_the_group_of_the_trainer_has_it(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous, "_wait_as_long_as", lambda *_: None)
    launch: Any = SimpleNamespace(
        world_size=2, rendezvous_timeout_seconds=60, master_addr="localhost", master_port=1
    )
    rank: Any = SimpleNamespace(rank=0)
    rendezvous.join(launch, rank)
    check(made, 1, rendezvous.MEETING_TIMEOUT)


def test_groups_within_and_between_nodes_have_it(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgroup, "_LASTING", {})
    for world_size in (4, 2):
        comm: Any = SimpleNamespace(world_size=world_size, timeout=TIMEOUT)
        assert subgroup._make([0, 1], comm, is_member=True) is not None
    check(made, 2)
    world: Any = dist.group.WORLD
    assert world.bound_device_id == DEVICE


def test_groups_of_an_engine_with_some_of_the_ranks_have_it(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_SECOND_GROUPS", {})
    comm = object.__new__(group.Comm)
    comm._members, comm.group = [0, 2], object()
    comm._make_groups(TIMEOUT, is_first=True)
    hosts, exchanges = made
    assert hosts is None
    check([exchanges], 1)
    assert comm.hosts is comm._hosts is not None


def test_other_backends_have_no_such_options() -> None:
    assert group.nccl_options("gloo", TIMEOUT) is None
