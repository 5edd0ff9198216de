"""Device of the engine's tests: the CPU, or with `ZEROTRAIN_TEST_DEVICE=cuda` one GPU for all ranks.

This module does not import torch, so that other tests need not load it.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("ZEROTRAIN_TEST_DEVICE", "cpu")
"""`cpu` or `cuda`."""

TRANSPORTS = ("nccl",) if DEVICE == "cuda" else ("shared", "gloo")
"""Transports between ranks on the device; the first is the default."""


def worlds(*sizes: int) -> list[tuple[int, str]]:
    """Return rows of `world_size` and `each_transport`: all of both, but one rank, which needs none, once."""
    return [(size, each) for size in sizes for each in TRANSPORTS if size > 1 or each == TRANSPORTS[0]]


def gpu_environment(rank: int) -> dict[str, str]:
    """Return the environment of a rank that shares the GPU.

    NCCL rejects two ranks on one GPU unless they are on different hosts. Each rank therefore claims a host of
    its own, and the ranks communicate over sockets.
    """
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def hide_gpus() -> None:
    """Hide GPUs from tests on the CPU, so that these run alike on all machines.

    Call it before CUDA starts.
    """
    if DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
