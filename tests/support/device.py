"""Where the engine's tests compute: the CPU, or with `ZEROTRAIN_TEST_DEVICE=cuda` one GPU for all ranks.

Without torch, so that other tests need not import it.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("ZEROTRAIN_TEST_DEVICE", "cpu")
"""`cpu` or `cuda`."""

TRANSPORTS = ("nccl",) if DEVICE == "cuda" else ("shared", "gloo")
"""How ranks may talk there; the first is what they do where a test does not say."""


def gpu_environment(rank: int) -> dict[str, str]:
    """For a rank that shares the GPU. NCCL takes two ranks on one GPU for a mistake unless they are on other
    hosts, which these say they are; they send over sockets then."""
    return {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def hide_gpus() -> None:
    """Tests on the CPU are the same on a machine with GPUs. Before anything asks CUDA."""
    if DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
