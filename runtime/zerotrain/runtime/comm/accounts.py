"""Accounts of one engine's collectives: bytes, time and a hash of their sequence; the base class of
`Comm`."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from zerotrain.runtime.comm.timing import CollectiveSample, Measurement, Pending, Stopwatch
from zerotrain.runtime.comm.watchdog import Watchdog
from zerotrain.runtime.comm.work import Delays, Watched

_HASH_BITS = (1 << 52) - 1  # float64, which carries the record, holds 52-bit integers exactly
TIMINGS_KEPT = 65_536
P = ParamSpec("P")
Handle = TypeVar("Handle")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMap:
    """Nodes of a group. Consecutive ranks share a node, as launchers number them."""

    world_size: int
    ranks_per_node: int

    @classmethod
    def of(cls, global_ranks: Sequence[int], *, local_world_size: int) -> NodeMap:
        """Map a group with these ranks of the job, of which `local_world_size` share a node (0 = all).

        The result is one node unless every node has an equal, contiguous run of ranks.
        """
        world_size = len(global_ranks)
        nodes = [rank // local_world_size if local_world_size > 0 else 0 for rank in global_ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[first : first + size] for first in range(0, world_size, size)]
        even = all(len(set(run)) == 1 and len(run) == size for run in runs)
        fits = even and len(runs) == len(set(nodes))
        return cls(world_size=world_size, ranks_per_node=size if fits else world_size)

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def outside(self) -> int:
        """Number of ranks on other nodes."""
        return self.world_size - self.ranks_per_node


class Accounts:
    """Base class that counts and times collectives. `Comm` sets the attributes that are only declared
    here."""

    rank: int
    world_size: int
    nodes: NodeMap
    _delays: Delays
    _watchdog: Watchdog | None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timings: deque[CollectiveSample] = deque(maxlen=TIMINGS_KEPT)
        """Finished collectives, oldest first; the exporter of metrics pops them."""
        self.bytes_sent: Counter[str] = Counter()
        """Bytes that this rank sent to the others, by operation; a broadcast counts its size on every
        rank."""
        self.cross_node_bytes: Counter[str] = Counter()
        """Part of `bytes_sent` that went to other nodes."""
        self.wait_seconds = 0.0
        """Seconds that the caller spent waiting for collectives since the last `take_wait_seconds`."""
        self._sequence = 0
        self.stopwatch = Stopwatch(device, self._finished)

    def issue(self, start: Callable[P, Handle], *args: P.args, **kwargs: P.kwargs) -> Handle:
        """Call `start` with the arguments, which issues a collective, and return its handle.

        Raises CommError with the watchdog's error if that has ended the group: NCCL then accepts no further
        collective, and its own error does not give the reason.
        """
        self._delays.pause()
        if self._watchdog is not None:
            self._watchdog.check()
        try:
            return start(*args, **kwargs)
        except RuntimeError:
            if self._watchdog is not None:
                self._watchdog.check()
            raise

    def account(
        self,
        op: str,
        label: str,
        bytes_each: int,
        work: Any,
        *,
        receivers: int | None = None,
        crossing: int | None = None,
        on_host: bool = False,
    ) -> Pending:
        """Account for a collective that was just issued, and return the `Pending` to wait for it.

        It sends `bytes_each` to each of `receivers` ranks (None: all others), and to `crossing` of them
        across a node boundary (None: once to every other node, as rings pass data on within a node).
        `on_host`: the wait blocks the host whatever the device is.
        """
        num_bytes = bytes_each * (self.world_size - 1 if receivers is None else receivers)
        self.bytes_sent[op] += num_bytes
        self.cross_node_bytes[op] += bytes_each * (self.nodes.num_nodes - 1 if crossing is None else crossing)
        word = zlib.crc32(f"{op} {label} {num_bytes}".encode())
        self._sequence = (self._sequence * 1_000_003 + word) & _HASH_BITS
        measurement = self.stopwatch.start(op, label, num_bytes)
        return Pending(self.watch(work, f"{op} for {label!r}", measurement, on_host=on_host).wait)

    def watch(
        self, work: Any, name: str, measurement: Measurement | None = None, *, on_host: bool = False
    ) -> Watched:
        """Wrap a handle so that the watchdog watches it, without accounting; `name` is the same on every
        rank; `on_host`: see `account`."""
        return Watched(
            work,
            name,
            rank=self.rank,
            watchdog=self._watchdog,
            delays=self._delays,
            measurement=measurement,
            on_host=on_host,
        )

    def check(self) -> None:
        """Raise CommError if the watchdog has found that a wait cannot succeed."""
        if self._watchdog is not None:
            self._watchdog.check()

    def note_error(self, error: BaseException) -> None:
        """Record an error that a call of the engine raised on this rank. Other ranks report it if this rank
        is missing from a collective."""
        if self._watchdog is not None:
            self._watchdog.note_error(error)

    def note_batch(self, epoch: int, batches: int, ended: bool) -> None:
        """Record the progress of the engine's own loader on this rank; see `EpochLoader.on_batch`."""
        if self._watchdog is not None:
            self._watchdog.batches = (epoch, batches, ended)

    def take_sequence(self) -> float:
        """Return the rolling hash of all collectives since the last call."""
        value, self._sequence = self._sequence, 0
        return float(value)

    def take_wait_seconds(self) -> float:
        """Return the seconds spent waiting for collectives since the last call."""
        value, self.wait_seconds = self.wait_seconds, 0.0
        return value

    @property
    def waiting_seconds(self) -> float | None:
        """Seconds that this rank has waited in its current collective; 0 = it is not waiting, None = there is
        no watchdog (as with one rank)."""
        return None if self._watchdog is None else self._watchdog.waiting_seconds

    def advise(self, text: str) -> None:
        """Append this text to all later errors about ranks that diverge: the possible reason and the
        remedy."""
        if self._watchdog is not None:
            self._watchdog.advice = f"; {text}"

    def poll_timings(self) -> None:
        """Move the measurements that the device has finished into `timings`; never blocks."""
        self.stopwatch.poll()

    def _finished(self, sample: CollectiveSample) -> None:
        self.wait_seconds += sample.exposed_seconds
        if sample.op:
            self.timings.append(sample)
