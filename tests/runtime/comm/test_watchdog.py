"""A collective that hangs ends with an error that names unit, operation and the missing rank."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerotrain.runtime as zt
from tests.support.device import TRANSPORTS
from tests.support.ranks import run_ranks
from zerotrain.contract.worker_environment import CommEnv
from zerotrain.runtime.comm import group, timing
from zerotrain.runtime.comm.group import Comm, CommError, pick_device
from zerotrain.runtime.comm.mismatch import Progress, diagnose
from zerotrain.runtime.comm.timing import Exchange, Pending, Stopwatch
from zerotrain.runtime.comm.watchdog import Watchdog
from zerotrain.runtime.comm.work import Delays, Watched, sendable

BOUND_S = 4.0
"""Bound in seconds, above the drift of ranks that start together on a busy machine."""


def progress(*recent: str, waiting: bool = False, before: int = 0) -> Progress:
    started = before + len(recent)
    numbered = {before + 1 + index: what for index, what in enumerate(recent)}
    return Progress(started=started, recent=numbered, waiting_for=started if waiting else None)


A, B, C = (f"all_gather for {unit!r}" for unit in ("blocks.0", "blocks.1", "blocks.2"))
R = "reduce_scatter for 'blocks.1'"


def failure(mine: Progress, *others: Progress, waited: float = 60.0) -> str | None:
    return diagnose(mine, dict(enumerate(others, 1)), rank=0, waited=waited, bound=50.0)


@pytest.mark.unit
def test_no_rank_is_accused_while_all_are_in_it() -> None:
    mine = progress(A, B, waiting=True)
    assert failure(mine, progress(A, B, waiting=True), progress(A, B, C)) is None
    assert failure(mine, progress(A), waited=49.0) is None, "a rank may be slow"
    assert failure(progress(A, B), progress(A)) is None, "not waiting"
    # Long histories that do not overlap any more say nothing about divergence.
    assert failure(mine, progress(C, C, before=200)) is None


@pytest.mark.unit
def test_a_collective_that_no_rank_is_missing_from_ends_too() -> None:
    """Ranks that read different parameters of one unit start the same collective and never meet."""
    mine = progress(A, B, waiting=True)
    found = failure(mine, progress(A, B, waiting=True), progress(A, B, C), waited=101.0)
    assert found is not None
    assert "although every rank has started it" in found


@pytest.mark.unit
def test_the_missing_rank_is_named_with_what_it_did_last() -> None:
    mine = progress(A, B, waiting=True)
    found = failure(mine, progress(A), progress(A, B, waiting=True))
    assert found is not None
    assert f"{B} on rank 0 has waited 60 s for ranks [1]" in found
    assert f"rank 1 last started {A}" in found
    assert "rank 2" not in found
    found = failure(mine, progress())
    assert found is not None
    assert "rank 1 has not started any collective" in found


@pytest.mark.unit
def test_of_the_late_ranks_the_one_that_waits_for_another_is_spared() -> None:
    found = failure(progress(A, B, C, waiting=True), progress(A, B, waiting=True), progress(A))
    assert found is not None
    assert "for ranks [2]" in found


@pytest.mark.unit
def test_ranks_that_can_never_meet_are_named_early() -> None:
    found = failure(progress(A, B, waiting=True), progress(A, R, waiting=True), waited=6.0)
    assert found is not None
    assert f"as collective 2 rank 1 started {R}, rank 0 {B}" in found


@pytest.mark.unit
def test_progress_survives_the_store() -> None:
    for mine in (progress(A, B, waiting=True), progress(), progress(C, before=7)):
        assert Progress.from_json(mine.to_json()) == mine


def comm_by(transport: str) -> Comm:
    asked = "auto" if transport == "nccl" else transport
    options = CommEnv(transport=asked, watchdog_seconds=BOUND_S)
    dist.barrier()  # the bound holds from the first collective on
    comm = Comm(device=pick_device(), options=options)
    comm.gather_record([0.0])
    return comm


def whole_and_part(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.zeros(40_000, device=comm.device)
    return part.repeat(comm.world_size), part


def end(pending: Pending | Exchange, comm: Comm) -> None:
    """Wait for the result. On a GPU `wait` returns at once, and records do not go by the device: the host
    waits for it, which is over when the watchdog has aborted the groups."""
    pending.wait()
    if comm.device.type == "cuda":
        torch.cuda.synchronize()
        comm.check()


def stay_away(transport: str) -> str:
    """Keep rank 1 away until rank 0 has raised and set a key in the store."""
    comm = comm_by(transport)
    store = dist.distributed_c10d._get_default_store()
    message = ""
    if comm.rank == 0:
        full, shard = whole_and_part(comm)
        try:
            end(comm.all_gather(full, shard, label="blocks.0"), comm)
        except CommError as error:
            message = str(error)
        store.set("raised", "1")
    else:
        store.wait(["raised"])
    comm.close()
    return message


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_stays_away_is_named(transport: str) -> None:
    message, _ = run_ranks(2, stay_away, transport)
    assert "all_gather for 'blocks.0' on rank 0 has waited" in message
    assert "for ranks [1], which are doing something else" in message
    assert "rank 1 last started all_gather for 'step record'" in message


def diverge(transport: str) -> str:
    comm = comm_by(transport)
    full, shard = whole_and_part(comm)
    try:
        if comm.rank == 0:
            end(comm.all_gather(full, shard, label="blocks.0"), comm)
        else:
            end(comm.start_exchange(full, label="blocks.1"), comm)
    except CommError as error:
        comm.close()
        return str(error)
    return "nothing raised"


@pytest.mark.ranks
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_in_different_collectives_are_named_early(transport: str) -> None:
    for rank, message in enumerate(run_ranks(2, diverge, transport)):
        # The rank that raises first leaves; the other one may report that, or what the first one found.
        assert "as collective 4" in message or "another rank ended" in message, message
        assert f"on rank {rank}" in message


def read_different_ones() -> str:
    """Let each rank wait for the other's part, in two parameters of one unit."""
    os.environ["ZEROTRAIN_WATCHDOG_SECONDS"] = str(BOUND_S)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
    settings["zero_optimization"] = {"stage": 3}
    engine, *_ = zt.initialize(model=model, config=settings)
    assert len(engine.core.units) == 1
    try:
        zt.get_full_fp32(list(model.parameters())[0 if engine.rank else 3]).cpu()
        engine.comm.check()  # on a GPU only values wait
    except CommError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing raised"


@pytest.mark.ranks
def test_ranks_that_read_different_parameters_are_reported() -> None:
    found = run_ranks(2, read_different_ones)
    expected = "for '3.weight'", "for '0.weight'"
    assert any(all(part in message for part in expected) for message in found), found
    assert "nothing raised" not in found


class DeviceWork:
    """A handle like NCCL's: a wait does not block, and nothing is raised."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        pass


def device_watchdog(bound_s: float, failures: queue.Queue[str]) -> tuple[Watchdog, Any]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Watchdog(store, rank=0, world_size=2, bound_seconds=bound_s, on_failure=failures.put), store


@pytest.mark.unit
def test_a_collective_on_the_device_is_let_go_when_it_is_over() -> None:
    """The handle holds the gathered weights or received gradients."""
    dog, _ = device_watchdog(600.0, queue.Queue())
    work = DeviceWork()
    dog.start(A, work)
    work.is_over = True
    held = weakref.ref(work)
    del work
    dog.start(B, DeviceWork())
    dog.close()
    assert held() is None


class LateEvent:
    """An event that the device does not reach."""

    def record(self, _stream: object) -> None:
        pass

    def query(self) -> bool:
        return False


@pytest.mark.unit
def test_a_wait_lets_go_of_what_the_collective_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device lags by a whole backward pass: the queue holds one collective per unit, but not its data."""
    monkeypatch.setattr(timing, "_event", LateEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    dog, _ = device_watchdog(600.0, queue.Queue())
    watch = Stopwatch(torch.device("cuda"), lambda sample: None)
    held = []
    for unit in range(8):
        work = DeviceWork()
        held.append(weakref.ref(work))
        watched = Watched(
            work,
            f"{A} {unit}",
            rank=0,
            watchdog=dog,
            delays=Delays(0.0, seed=0),
            measurement=watch.start("reduce_scatter", str(unit), 8),
        )
        watched.wait()
        del work, watched
    dog._look()
    assert [work() for work in held] == [None] * 8
    assert dog.waiting_seconds > 0.0  # the first one is not over
    dog.close()


@pytest.mark.unit
def test_on_the_device_the_next_wait_raises_the_failure() -> None:
    failures: queue.Queue[str] = queue.Queue()
    dog, store = device_watchdog(0.1, failures)
    store.set("zerotrain-watchdog/1", progress().to_json())
    watched = Watched(DeviceWork(), A, rank=0, watchdog=dog, delays=Delays(0.0, seed=0))
    failure = failures.get(timeout=180)
    with pytest.raises(CommError, match=re.escape(failure)):
        watched.wait()
    dog.close()


@pytest.mark.unit
def test_the_thread_asks_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: queue.Queue[tuple[str, torch.device]] = queue.Queue()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.put((threading.current_thread().name, device))
    )
    store = dist.HashStore()  # type: ignore[attr-defined]
    for device in (torch.device("cpu"), torch.device("cuda", 3)):
        Watchdog(store, rank=0, world_size=2, bound_seconds=60.0, device=device).close()
    assert chosen.get(timeout=60) == ("zerotrain-watchdog", torch.device("cuda", 3))
    assert chosen.empty()


@pytest.mark.unit
def test_the_thread_disturbs_no_capture_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: queue.Queue[tuple[str, int]] = queue.Queue()

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
            modes.put((threading.current_thread().name, mode._obj.value))
            return 0

    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    store = dist.HashStore()  # type: ignore[attr-defined]
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        Watchdog(store, rank=0, world_size=2, bound_seconds=60.0, device=device).close()
    assert modes.get(timeout=60) == ("zerotrain-watchdog", 1)
    assert modes.empty()


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("NCCL communicator was aborted")


def after_the_failure() -> list[str]:
    """Return what each collective raises when the group was ended, while it starts and before."""
    comm, found = comm_by("gloo"), []
    dog, part = comm._watchdog, torch.zeros(8, device=comm.device)
    assert dog is not None
    whole = part.repeat(comm.world_size)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "all_gather_into_tensor", "broadcast", "all_to_all_single"):
            patch.setattr(dist, name, refuse, raising=False)
        patch.setattr(group, "FLAT_ALL_GATHER", refuse)
        starts = (
            lambda: comm.all_gather(whole, part, label="x"),
            lambda: comm.start_exchange(whole, label="x"),
            lambda: comm.broadcast(part, label="x"),
        )
        for failure in (None, "rank 1 is elsewhere"):
            dog._failure = failure
            for start in starts:
                try:
                    start()
                except RuntimeError as error:
                    found.append(f"{type(error).__name__}: {error}")
    dog._failure = None
    comm.close()
    return found


@pytest.mark.ranks
def test_collectives_after_a_failure_raise_it() -> None:
    """NCCL refuses them when they are issued, where nobody waits yet."""
    for found in run_ranks(2, after_the_failure):
        assert (
            found
            == ["RuntimeError: NCCL communicator was aborted"] * 3 + ["CommError: rank 1 is elsewhere"] * 3
        )


@pytest.mark.unit
def test_what_nccl_cannot_carry_goes_as_bytes() -> None:
    for tensor in (torch.arange(6, dtype=torch.int16).view(2, 3), torch.tensor(-2, dtype=torch.int16)):
        sent = sendable(tensor)
        assert sent.dtype is torch.uint8
        assert (sent.data_ptr(), sent.nbytes) == (tensor.data_ptr(), tensor.nbytes)
    whole = torch.zeros(3, dtype=torch.bfloat16)
    assert sendable(whole) is whole


@pytest.mark.ranks
def test_no_watchdog_without_a_bound() -> None:
    assert run_ranks(2, threads_of, 0.0) == [0, 0]
    assert run_ranks(2, threads_of, 5.0) == [1, 1]


def threads_of(bound_seconds: float) -> int:
    """Return the number of watchdogs while a `Comm` is open; none may remain afterwards."""
    comm = Comm(device=pick_device(), options=CommEnv(watchdog_seconds=bound_seconds))
    alive = _watchdogs()
    comm.close()
    assert _watchdogs() == 0
    return alive


def _watchdogs() -> int:
    return sum(thread.name == "zerotrain-watchdog" for thread in threading.enumerate())
