"""Rendezvous of the ranks: one store with a bounded wait, then the process group."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv
from zerotrain.runtime.comm.group import nccl_options, pick_device

MEETING_TIMEOUT = timedelta(minutes=30)
"""Timeout for connecting to ranks that are known to be there, and, without an operator, for every later
collective."""


class RendezvousTimeout(Exception):
    """Raised when not all ranks come within the time that the job gives."""

    exit_code: ExitCode = ExitCode.RENDEZVOUS_TIMEOUT


def join(launch: LaunchSpec, rank: RankEnv) -> None:
    """Make the default process group of all ranks; do nothing for one rank. Raises RendezvousTimeout."""
    if launch.world_size == 1:
        return
    seconds, device = launch.rendezvous_timeout_seconds, pick_device()
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    backend = "nccl" if device.type == "cuda" else "gloo"
    began = time.monotonic()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            launch.master_addr,
            launch.master_port,
            world_size=launch.world_size,
            is_master=rank.rank == 0,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=True,
        )
        dist.init_process_group(
            backend=backend,
            store=store,
            rank=rank.rank,
            world_size=launch.world_size,
            timeout=MEETING_TIMEOUT,
            pg_options=nccl_options(backend, MEETING_TIMEOUT),
            **bound,
        )
        _wait_as_long_as(launch, store)
    except RuntimeError as error:  # also of gloo, which has its own rendezvous
        raise RendezvousTimeout(
            f"rank {rank.rank} did not meet all {launch.world_size} ranks at {launch.master_addr}:"
            f"{launch.master_port}: given up after {time.monotonic() - began:.1f} s of {seconds:.0f} s "
            f"({str(error).splitlines()[0]}); "
            f"look for workers that never started, or another program on port {launch.master_port}"
        ) from error


def _wait_as_long_as(launch: LaunchSpec, store: Any) -> None:
    """Set the timeout of later waits between ranks as the launch says."""
    timeout = MEETING_TIMEOUT
    if launch.hang_backstop_seconds is not None:
        timeout = timedelta(seconds=launch.hang_backstop_seconds)
        dist.distributed_c10d._set_pg_timeout(timeout)
    # Later groups are made while peers may still load a large model.
    store.set_timeout(timeout)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
