"""Check that libraries see as many ranks as the launcher started, before the first step."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from zerotrain.contract.worker_environment import LaunchError, RankEnv


def check_worlds() -> None:
    """Raise LaunchError if torch's default group, or Accelerate, has another number of ranks than was
    started.

    Accelerate decides that when its state is made. Where it knows no backend for the device, it goes on with
    one rank and says nothing: each rank would then draw all data and train on it, as if it were alone.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    joined = dist.get_world_size() if dist.is_initialized() else started
    if joined != started and RankEnv.from_env(os.environ).channel_socket is not None:
        raise LaunchError(_text("torch's default process group", joined, started))
    seen = _accelerates()
    if seen is not None and seen != joined:
        raise LaunchError(_text("Accelerate", seen, joined))


def check_seen(who: str, seen: int) -> None:
    """Raise LaunchError unless a library counts as many ranks as the launcher started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if seen != started:
        raise LaunchError(_text(who, seen, started))


def _accelerates() -> int | None:
    """Return the number of processes of Accelerate's state; None if it has none here."""
    module = sys.modules.get("accelerate.state")
    state = getattr(getattr(module, "PartialState", None), "_shared_state", None)
    number = state.get("num_processes") if isinstance(state, dict) else None
    return number if isinstance(number, int) else None


def _text(who: str, seen: int, started: int) -> str:
    rank = os.environ.get("RANK", "0")
    return (
        f"rank {rank}: {who} sees {seen} rank{'s' if seen > 1 else ''}, but {started} were started, so each "
        "would train alone, on data meant for one; start the script with `zerotrain "
        "launch` or `python -m zerotrain.compat`, call zerotrain.compat.deepspeed() before the library is "
        "imported, and leave RANK, WORLD_SIZE and LOCAL_RANK as they are"
    )
