"""Handles of collectives in flight, and the wait for one; used by `group.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.mismatch import CommError
from zerotrain.runtime.comm.timing import Measurement
from zerotrain.runtime.comm.watchdog import Watchdog

LOOK_AFTER = timedelta(milliseconds=200)
"""Time that a wait on gloo or in the store lasts; then the watchdog is checked, and the wait starts again."""


EXPLAIN_S = 2.0
"""Seconds that a wait which failed in the backend looks for the rank that has ended: its process may still be
exiting."""


class Delays:
    """Random pauses of at most `most_seconds` each around collectives, in a different sequence on every rank:
    tests so meet orders of events that an idle machine never produces."""

    def __init__(self, most_seconds: float, *, seed: int) -> None:
        self._most = most_seconds
        self._random = random.Random(seed)

    def pause(self) -> None:
        """Sleep for a random part of `most_seconds`."""
        if self._most > 0.0:
            time.sleep(self._random.random() * self._most)


class Ready:
    """Handle of ours: its wait is a function, which asks the watchdog by itself while it lasts."""

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
    """Handle that the watchdog watches, whose time is measured, and whose errors name the collective."""

    def __init__(
        self,
        work: Any,
        name: str,
        *,
        rank: int,
        watchdog: Watchdog | None,
        delays: Delays,
        measurement: Measurement | None = None,
        on_host: bool = False,
    ) -> None:
        """Report the collective to the watchdog; `name` is the same on every rank. `on_host`: the wait blocks
        the host beside an accelerator, too."""
        self._work = work
        self._what = f"{name} on rank {rank}"
        self._watchdog = watchdog
        self._delays = delays
        self._measurement = measurement
        self._on_host = on_host or (watchdog is not None and watchdog.is_host)
        self._number = 0 if watchdog is None else watchdog.start(name, work)

    def wait(self) -> None:
        """Wait for the collective. Raises CommError.

        Everything that happens around a wait is in this one function: a stack shows it once.
        """
        work, watchdog = self._work, self._watchdog
        if self._measurement is not None:
            self._measurement.ask()
        self._delays.pause()
        if watchdog is not None:
            watchdog.enter(self._number)
        try:
            if watchdog is None or not self._on_host or isinstance(work, Ready):
                work.wait()
                if watchdog is not None:
                    watchdog.check()  # on CUDA an aborted collective ends without an error
            else:
                is_over = False
                while not is_over:
                    try:
                        work.wait(LOOK_AFTER)
                        is_over = True
                    except RuntimeError:
                        is_over = work.is_completed()
                        if is_over:
                            work.wait()  # raises the collective's own error
                        else:
                            watchdog.check()
        except RuntimeError as error:
            self._raise_named(error)
        finally:
            if watchdog is not None:
                watchdog.leave()
        if self._measurement is not None:
            self._measurement.end()
            if watchdog is not None and not watchdog.is_host:
                watchdog.waited(self._number, self._measurement.is_completed)

    def _raise_named(self, error: RuntimeError) -> NoReturn:
        """Raise a CommError with the name of the collective, and with the rank that is missing if one is."""
        watchdog = self._watchdog
        if watchdog is None:
            if isinstance(error, CommError):
                raise error
            raise CommError(self._failed(f"most likely because another rank ended: {error}")) from error
        if isinstance(error, CommError):
            known = None if watchdog.has_failed else watchdog.explain()
            text = str(error) if known is None else self._failed(f"because {known}")
            if text == str(error) and text.endswith(watchdog.advice):
                raise error
            raise CommError(text + watchdog.advice) from None
        known = watchdog.explain(seconds=EXPLAIN_S)
        if known is not None:  # the backend's own error would name connections, not ranks
            raise CommError(self._failed(f"because {known}") + watchdog.advice) from None
        text = self._failed(f"most likely because another rank ended: {error}")
        raise CommError(text + watchdog.advice) from error

    def _failed(self, reason: str) -> str:
        return f"{self._what} failed, {reason}"


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
