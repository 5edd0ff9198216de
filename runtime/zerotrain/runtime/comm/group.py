"""The data-parallel process groups and the collectives the engine uses on them.

Every collective goes through `Comm`, which times it, counts its bytes and folds it into a rolling hash; the
hash rides in the step record, so ranks that issued different sequences get a named error instead of wrong
numbers.

Two groups: gathers of parameters and exchanges of gradients interleave differently with compute, and one
group would force one order on both. At world size 1 nothing touches torch.distributed.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.runtime.comm.timing import CollectiveSample, Pending, Stopwatch

_HASH_BITS = (1 << 52) - 1  # float64, which carries the record, holds 52-bit integers exactly
DEFAULT_TIMEOUT = timedelta(minutes=30)
TIMINGS_KEPT = 65_536
BROADCAST_BYTES = 1 << 16
"""Size from which a gather on gloo is made of broadcasts; below it latency counts."""


class CommError(RuntimeError):
    """The process group cannot be set up, or the ranks disagree on what they do."""


class _Named:
    """A handle whose failure says which collective of which unit it was."""

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CommError(
                f"{self._what} failed, most likely because another rank ended: {error}"
            ) from error


class _AllOf:
    """Several handles as one."""

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Comm:
    """Rank, world size and the collectives of one engine; all ranks call every method in the same order."""

    def __init__(self, *, device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """Join the group: the default one if the program made it, else `env://`. Collective."""
        self.device = device
        self.timings: deque[CollectiveSample] = deque(maxlen=TIMINGS_KEPT)
        """Finished collectives, oldest first; whoever exports metrics pops them."""
        self.bytes_sent: Counter[str] = Counter()
        """Bytes this rank put on the wire, by operation; a broadcast counts its size on every rank."""
        self.wait_seconds = 0.0
        """Time the caller spent waiting for collectives since the last `take_wait_seconds`."""
        self._sequence = 0
        self._stopwatch = Stopwatch(device, self._finished)
        self._owns_default = _join(device, timeout)
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self._gathers = dist.group.WORLD if joined else None
        self._exchanges = dist.new_group(timeout=timeout) if self.world_size > 1 else None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, label: str) -> Pending:
        """Start filling `full` (1-D, world_size * shard elements) with every rank's `shard`, in rank order.

        `shard` may be this rank's part of `full` itself. Both must stay alive until `wait()`.
        """
        if self.world_size == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return Pending.done()
        if self.device.type == "cpu" and full.nbytes >= BROADCAST_BYTES:
            work = self._gather_by_broadcasts(full, shard)
        else:
            work = _ALL_GATHER(full, shard, group=self._gathers, async_op=True)
        num_bytes = (self.world_size - 1) * shard.numel() * shard.element_size()
        return self._started("all_gather", label, num_bytes, work)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, *, label: str) -> Pending:
        """Start the all-to-all of equal parts: part i of `sent` goes to rank i, `received` holds rank order.

        Followed by a local sum this is a reduce-scatter whose order of additions, and so whose bits, do not
        depend on timing; on gloo it is also the faster one.
        """
        work = dist.all_to_all_single(received, sent, group=self._exchanges, async_op=True)
        num_bytes = (sent.numel() - sent.numel() // self.world_size) * sent.element_size()
        return self._started("reduce_scatter", label, num_bytes, work)

    def gather_record(self, record: Sequence[float]) -> list[list[float]]:
        """All-gather one short record of float64 per rank; the answer is in rank order and equal
        everywhere."""
        if self.world_size == 1:
            return [list(record)]
        mine = torch.tensor(record, dtype=torch.float64, device=self.device)
        full = torch.empty(self.world_size * mine.numel(), dtype=torch.float64, device=self.device)
        self.all_gather(full, mine, label="step record").wait()
        rows: list[list[float]] = full.view(self.world_size, -1).tolist()
        return rows

    def broadcast(self, tensor: torch.Tensor, *, label: str, source: int = 0) -> None:
        """Overwrite `tensor` with rank `source`'s values; blocks."""
        if self.world_size == 1:
            return
        work = dist.broadcast(tensor, group_src=source, group=self._gathers, async_op=True)
        self._started("broadcast", label, tensor.nbytes, work).wait()

    def take_sequence(self) -> float:
        """The rolling hash of all collectives since the last call."""
        value, self._sequence = self._sequence, 0
        return float(value)

    def take_wait_seconds(self) -> float:
        """Seconds spent waiting for collectives since the last call."""
        value, self.wait_seconds = self.wait_seconds, 0.0
        return value

    def poll_timings(self) -> None:
        """Move measurements that finished on the device into `timings`; never waits."""
        self._stopwatch.poll()

    def close(self) -> None:
        """Leave the groups that this object made."""
        if self._exchanges is not None and dist.is_initialized():
            dist.destroy_process_group(self._exchanges)
            self._exchanges = None
        if self._owns_default and dist.is_initialized():
            dist.destroy_process_group()
            self._owns_default = False

    def _gather_by_broadcasts(self, full: torch.Tensor, shard: torch.Tensor) -> _AllOf:
        """One broadcast per rank, straight into place: gloo's own all-gather goes through a copy of the
        whole."""
        parts = full.view(self.world_size, -1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        return _AllOf(
            dist.broadcast(part, group_src=source, group=self._gathers, async_op=True)
            for source, part in enumerate(parts)
        )

    def _started(self, op: str, label: str, num_bytes: int, work: Any) -> Pending:
        self.bytes_sent[op] += num_bytes
        word = zlib.crc32(f"{op} {label} {num_bytes}".encode())
        self._sequence = (self._sequence * 1_000_003 + word) & _HASH_BITS
        named = _Named(work, f"{op} for {label!r} on rank {self.rank}")
        return self._stopwatch.start(op, label, num_bytes, named)

    def _finished(self, sample: CollectiveSample) -> None:
        self.wait_seconds += sample.exposed_seconds
        self.timings.append(sample)


def pick_device() -> torch.device:
    """CUDA device of LOCAL_RANK when there is CUDA, else the CPU. Makes it current."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, timeout: timedelta) -> bool:
    """Make the default group unless it exists or there is one rank; say whether we made it."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CommError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so {', '.join(missing)} must be set too; "
            "start the ranks with `python -m zerotrain.runtime.launch` or torchrun"
        )
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout, **bound)
    return True


# torch 2.13 renamed the flat all-gather; the old name works, with a warning, on both sides of the change.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
