"""`init_distributed`: makes the default process group, for scripts that need it before `initialize`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from zerotrain.contract.worker_environment import CommEnv
from zerotrain.runtime.comm.group import STORE, CommError, nccl_options, pick_device, timeout_of
from zerotrain.runtime.comm.rank_records import announce_process
from zerotrain.runtime.comm.watchdog import own_store

_ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def init_distributed(
    dist_backend: str | None = None,
    *,
    distributed_port: int = 29500,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
    **_: Any,
) -> None:
    """Make torch's default process group from the launcher's environment, unless it exists. Collective.

    `dist_backend` None = NCCL on CUDA, else gloo. Negative `rank` and `world_size` are read from the
    environment, and mean one rank if that has none. `timeout` None = 30 minutes, or the longer one that the
    operator sets when it handles hangs. Further arguments of DeepSpeed's function have no effect. Raises
    CommError if several ranks are requested without an address to meet at, or if `dist_init_required` is
    False and there is no group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise CommError(
            "dist_init_required=False says that the process group exists, but it does not; leave it out"
        )
    environment = {**_ONE_RANK, **os.environ}
    rank = int(environment["RANK"]) if rank < 0 else rank
    world_size = int(environment["WORLD_SIZE"]) if world_size < 0 else world_size
    device = pick_device()
    backend = dist_backend or ("nccl" if device.type == "cuda" else "gloo")
    where: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if init_method is not None:
        where["init_method"] = init_method
    elif world_size == 1:
        where["store"] = HashStore()
    elif "MASTER_ADDR" not in os.environ:
        raise CommError(
            f"world size is {world_size}, so MASTER_ADDR must be set too; start the ranks with "
            "`python -m zerotrain.runtime.launch` or torchrun"
        )
    else:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    timeout = timeout or timeout_of(CommEnv.from_env(os.environ))
    dist.init_process_group(backend, timeout=timeout, pg_options=nccl_options(backend, timeout), **where)
    if world_size > 1:
        announce_process(
            own_store(STORE), dist.get_rank()
        )  # for ranks that wait in `initialize` for this one
