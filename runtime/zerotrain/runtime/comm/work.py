"""Handles of collectives in flight, and the wait for one; used by `group.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.delays import Delays
from zerotrain.runtime.comm.errors import CommError
from zerotrain.runtime.comm.watchdog import Watchdog

_LOOK_AFTER = timedelta(milliseconds=200)
"""Time that a wait on gloo lasts before the watchdog is checked; then the wait starts again."""


EXPLAIN_S = 2.0
"""Seconds that a wait which failed in the backend looks for the rank that has ended: its process may still be
exiting."""


class Ready:
    """Handle whose wait is a function."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class AllOf:
    """Several handles as one."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Watched:
    """Handle that the watchdog watches, and whose errors name the collective."""

    def __init__(self, work: Any, name: str, *, rank: int, watchdog: Watchdog | None, delays: Delays) -> None:
        """Report the collective to the watchdog; `name` is the same on every rank."""
        self._work = work
        self._what = f"{name} on rank {rank}"
        self._watchdog = watchdog
        self._delays = delays
        self._number = 0 if watchdog is None else watchdog.start(name, work)

    def wait(self) -> None:
        """Wait for the collective. Raises CommError."""
        self._delays.pause()
        if self._watchdog is None:
            self._end()
            return
        self._watchdog.enter(self._number)
        try:
            self._end()
        finally:
            self._watchdog.leave()

    def _end(self) -> None:
        try:
            if self._watchdog is not None and self._watchdog.is_host and not isinstance(self._work, Ready):
                self._wait_watched(self._watchdog)
            else:
                self._work.wait()
                if self._watchdog is not None:
                    self._watchdog.check()  # on CUDA an aborted collective ends without an error
        except CommError as error:
            if self._watchdog is None:
                raise
            known = None if self._watchdog.has_failed else self._watchdog.explain()
            text = str(error) if known is None else f"{self._what} failed, because {known}"
            if text == str(error) and text.endswith(self._watchdog.advice):
                raise
            raise CommError(text + self._watchdog.advice) from None
        except RuntimeError as error:
            advice = "" if self._watchdog is None else self._watchdog.advice
            known = None if self._watchdog is None else self._watchdog.explain(seconds=EXPLAIN_S)
            if known is not None:  # the backend's own error would name connections, not ranks
                raise CommError(f"{self._what} failed, because {known}{advice}") from None
            raise CommError(
                f"{self._what} failed, most likely because another rank ended: {error}{advice}"
            ) from error

    def _wait_watched(self, watchdog: Watchdog) -> None:
        while True:
            try:
                self._work.wait(_LOOK_AFTER)
                return
            except RuntimeError:
                if self._work.is_completed():
                    self._work.wait()  # raises the collective's own error
                    return
                watchdog.check()


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory in a dtype that every backend supports: NCCL has no int16, gloo no float8."""
    is_float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.reshape(-1).view(torch.uint8) if is_float8 or tensor.dtype is torch.int16 else tensor


def gather_by_broadcasts(full: torch.Tensor, shard: torch.Tensor, *, rank: int, group: Any) -> AllOf:
    """Start one broadcast per rank, straight into place: gloo's own all-gather copies the whole tensor."""
    parts = sendable(full).view(dist.get_world_size(group), -1)
    if parts[rank].data_ptr() != shard.data_ptr():
        parts[rank].copy_(sendable(shard))
    return AllOf(
        dist.broadcast(part, group_src=source, group=group, async_op=True)
        for source, part in enumerate(parts)
    )


# torch 2.13 renamed the flat all-gather; the old name still works in later versions, with a warning.
FLAT_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
