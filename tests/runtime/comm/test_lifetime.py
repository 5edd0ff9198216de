"""Engines of one process come and go in any order: the process group that `initialize` made outlives them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerotrain.runtime as zt
from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from zerotrain.contract.worker_environment import CommEnv, LaunchError
from zerotrain.runtime.comm import group
from zerotrain.runtime.comm.group import Comm, CommError, pick_device

pytestmark = pytest.mark.ranks


def launch(port: int) -> Any:
    """Set up an environment like torchrun's, whose agent keeps one store for the job; return the store."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None  # type: ignore[attr-defined]


def make_engine() -> zt.Engine:
    torch.manual_seed(0)
    engine, *_ = zt.initialize(
        model=torch.nn.Linear(8, 8),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}},
    )
    return engine


def step(engine: zt.Engine) -> float:
    torch.manual_seed(1)
    engine.backward(engine(torch.randn(1, 8)).square().mean())
    norm = engine.step().grad_norm
    assert norm is not None
    return norm


def come_and_go(port: int, folder: Path) -> list[float]:
    store = launch(port)
    first, second = make_engine(), make_engine()
    norms = [step(first)]
    first.close()
    norms.append(step(second))
    second.save_checkpoint(folder)
    second.close()
    third = make_engine()
    norms.append(step(third))
    third.load_checkpoint(folder)
    assert third.global_steps == 1
    third.close()
    dist.barrier()  # the store ends with rank 0
    del store
    return norms


@pytest.mark.parametrize("world_size", [2])
def test_engines_come_and_go(world_size: int, tmp_path: Path) -> None:
    first, other = run_ranks(world_size, come_and_go, free_port(), tmp_path)
    assert first == other
    assert len(set(first)) == 1


def close_twice() -> None:
    comm = Comm(device=torch.device("cpu"), options=CommEnv(transport="shared"))
    assert comm.shares_memory
    comm.close()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]
    comm.close()
    for file in files:
        os.close(file)  # raises if it is closed already


def test_the_second_close_touches_no_other_files() -> None:
    run_ranks(2, close_twice)


def destroy_first(folder: str) -> str:
    """Destroy the process group of an open engine."""
    engine, *_ = zt.initialize(
        model=torch.nn.Linear(8, 8),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    )
    dist.destroy_process_group()
    try:
        engine.save_checkpoint(folder)
    except CommError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_group_that_the_script_destroyed_is_named(tmp_path: Path) -> None:
    for found in run_ranks(2, destroy_first, str(tmp_path)):
        assert found.startswith("the process group of the ranks was destroyed")
        assert "call engine.close() on every rank before" in found


def shared_files() -> list[bool]:
    """Return for each descriptor whether programs that this rank starts would inherit the memory."""
    comm = Comm(device=torch.device("cpu"), options=CommEnv(transport="shared"))
    found = [
        os.get_inheritable(int(link.name))
        for link in list(Path("/proc/self/fd").iterdir())
        if link.is_symlink() and "memfd:zerotrain" in os.readlink(link)
    ]
    comm.close()
    return found


def test_other_programs_inherit_no_memory() -> None:
    for found in run_ranks(2, shared_files):
        assert len(found) >= 2
        assert not any(found)


def ask_as_rank(options: tuple[CommEnv, ...]) -> tuple[int, str]:
    try:
        comm = Comm(device=torch.device("cpu"), options=options[dist.get_rank()])
    except CommError as error:
        return 0, str(error)
    rows = comm.gather_record([1.0])
    comm.close()
    return comm.nodes.num_nodes, f"{comm.transport} {rows}"


def test_ranks_with_unequal_environments_decide_together() -> None:
    sizes = tuple(CommEnv(transport="shared", local_world_size=size) for size in (2, 2, 1))
    assert run_ranks(3, ask_as_rank, sizes) == [(1, "shared [[1.0], [1.0], [1.0]]")] * 3
    transports = tuple(CommEnv(transport=name) for name in ("gloo", "shared", "gloo"))
    for _, message in run_ranks(3, ask_as_rank, transports):
        assert message == (
            "ZEROTRAIN_TRANSPORT must be the same on every rank; "
            "got shared on ranks [1]; gloo on ranks [0, 2]"
        )


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(group, "bind_to_node_of", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device() == torch.device("cuda", 1) == chosen.pop() == chosen.pop()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(LaunchError, match=r"needs GPU 2, but the process sees 2; start as many ranks"):
        pick_device()
    assert not chosen


@pytest.mark.parametrize(
    ("is_built", "way_out"),
    [(True, r"set podTemplate\.runtimeClassName"), (False, "whose torch is built for CUDA")],
)
def test_a_worker_with_gpus_that_torch_does_not_see_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, way_out: str
) -> None:
    """Training on CPUs would cost what the GPUs do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    assert pick_device() == torch.device("cpu")
    monkeypatch.setenv("ZEROTRAIN_GPUS", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(LaunchError, match=rf"requests 8 GPUs, of which torch .* sees none: .*{way_out}"):
        pick_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device() == torch.device("cpu")
