"""Functions run as several ranks: real processes with real gloo, forked from one that has imported torch.

On a GPU (`device.DEVICE`) the ranks share it and communicate through NCCL.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.support.device import TRANSPORTS, gpu_environment
from tests.support.forkserver import CONTEXT
from zerotrain.runtime.comm.group import pick_device

TIMEOUT_S = 240.0
"""Timeout of a run, far above what it takes, so that a busy machine changes no outcome."""

# References run in the test's own process: the same number of threads gives the same bits as on the ranks.
torch.set_num_threads(1)

_transport = TRANSPORTS[0]


def current_transport() -> str:
    """Return the transport of the ranks of `run_ranks`, one of `TRANSPORTS`.

    A probe would depend on timing, so it never decides.
    """
    return _transport


@contextmanager
def use_transport(name: str) -> Iterator[None]:
    """Use this transport for ranks that are started in the block."""
    global _transport
    before, _transport = _transport, name
    try:
        yield
    finally:
        _transport = before


class RankFailed(AssertionError):
    """A rank raised or died; carries its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a fresh process group; return results in rank order.

    The function must be importable by name and its arguments and result picklable (no tensors). Raises
    RankFailed with the traceback of the first rank that failed.
    """
    try:
        return _run(world_size, function, args)
    except RankFailed as error:
        # gloo chooses its own ports for connecting; another test's process on this machine may have taken
        # one.
        if "connectFullMesh failed" not in str(error):
            raise
    return _run(world_size, function, args)


def _run(world_size: int, function: Callable[..., Any], args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, world_size, Path(folder), function, args) for rank in range(world_size)]
        try:
            return [_result(rank, connection) for rank, (_, connection) in enumerate(_in_time(ranks))]
        finally:
            for process, _ in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _start(rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: Any) -> Any:
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(
        target=_rank_main, args=(rank, world_size, folder, _transport, send, function, args), daemon=True
    )
    process.start()
    send.close()
    return process, receive


def _in_time(ranks: list[Any]) -> list[Any]:
    """Wait until every rank has answered or died.

    A failed rank ends the wait, as the others may wait for it forever.
    """
    waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT_S)
        if not ready:
            raise RankFailed(f"{len(waiting)} of {len(ranks)} ranks did not answer within {TIMEOUT_S} s")
        for connection in ready:
            index = waiting.pop(connection)
            answer = _receive(connection)
            ranks[index] = (ranks[index][0], answer)
            if not answer[0]:
                _result(index, answer)
    return ranks


def _receive(connection: Any) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = connection.recv()
    except EOFError:
        return False, "the process died without an answer (a crash in native code?)"
    return answer


def _result(rank: int, answer: tuple[bool, Any]) -> Any:
    succeeded, value = answer
    if not succeeded:
        raise RankFailed(f"rank {rank}: {value}")
    return value


def _rank_main(
    rank: int,
    world_size: int,
    folder: Path,
    transport: str,
    send: Connection,
    function: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if transport == "nccl":
        _share_gpu(rank)
    else:
        os.environ["ZEROTRAIN_TRANSPORT"] = transport
    try:
        if world_size > 1:
            bound: dict[str, Any] = {"device_id": pick_device()} if transport == "nccl" else {}
            dist.init_process_group(
                "nccl" if transport == "nccl" else "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
                **bound,
            )
        send.send((True, function(*args)))
    except BaseException:
        send.send((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _share_gpu(rank: int) -> None:
    os.environ.update(gpu_environment(rank))
    register_module_forward_pre_hook(_to_gpu)  # type: ignore[arg-type]


def _to_gpu(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move the inputs to the GPU, as a script does with its batches."""
    return tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in inputs)
