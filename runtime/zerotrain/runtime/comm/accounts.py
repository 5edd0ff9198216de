"""What the collectives of one engine took: bytes, time, the hash of their sequence; the base of `Comm`."""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from zerotrain.runtime.comm.delays import Delays
from zerotrain.runtime.comm.nodes import NodeMap
from zerotrain.runtime.comm.timing import CollectiveSample, Pending, Stopwatch
from zerotrain.runtime.comm.watchdog import Watchdog
from zerotrain.runtime.comm.work import Watched

_HASH_BITS = (1 << 52) - 1  # float64, which carries the record, holds 52-bit integers exactly
TIMINGS_KEPT = 65_536


class Accounts:
    """`Comm` sets what is only declared here."""

    rank: int
    world_size: int
    nodes: NodeMap
    _delays: Delays
    _watchdog: Watchdog | None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timings: deque[CollectiveSample] = deque(maxlen=TIMINGS_KEPT)
        """Finished collectives, oldest first; whoever exports metrics pops them."""
        self.bytes_sent: Counter[str] = Counter()
        """Bytes this rank gave to the others, by operation; a broadcast counts its size on every rank."""
        self.cross_node_bytes: Counter[str] = Counter()
        """The part of `bytes_sent` that went to other nodes."""
        self.wait_seconds = 0.0
        """Time the caller spent waiting for collectives since the last `take_wait_seconds`."""
        self._sequence = 0
        self._stopwatch = Stopwatch(device, self._finished)

    def issue(self, start: Callable[[], Any]) -> Any:
        """The handle of a collective that `start` issues. Raises the watchdog's verdict where that has ended
        the group: NCCL takes no further collective then, and says so in words of its own."""
        if self._watchdog is not None:
            self._watchdog.check()
        try:
            return start()
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
    ) -> Pending:
        """Take a collective that was just issued into the accounts; its wait.

        It gives `bytes_each` to each of `receivers` ranks (None: all others), `crossing` of them over the
        border of a node (None: all other nodes once, as rings pass data on within a node).
        """
        num_bytes = bytes_each * (self.world_size - 1 if receivers is None else receivers)
        self.bytes_sent[op] += num_bytes
        self.cross_node_bytes[op] += bytes_each * (self.nodes.num_nodes - 1 if crossing is None else crossing)
        word = zlib.crc32(f"{op} {label} {num_bytes}".encode())
        self._sequence = (self._sequence * 1_000_003 + word) & _HASH_BITS
        return self._stopwatch.start(op, label, num_bytes, self.watch(work, f"{op} for {label!r}"))

    def watch(self, work: Any, name: str) -> Watched:
        """A handle under the watchdog's eyes, outside of the accounts; `name` is the same on every rank."""
        return Watched(work, name, rank=self.rank, watchdog=self._watchdog, delays=self._delays)

    def check(self) -> None:
        """Raise CommError where the watchdog has found that a wait cannot end well."""
        if self._watchdog is not None:
            self._watchdog.check()

    def note_error(self, error: BaseException) -> None:
        """A call of the engine raised on this rank: said to the other ranks if they miss it."""
        if self._watchdog is not None:
            self._watchdog.note_error(error)

    def note_batch(self, epoch: int, batches: int, ended: bool) -> None:
        """How far the engine's own loader is on this rank; see `EpochLoader.on_batch`."""
        if self._watchdog is not None:
            self._watchdog.batches = (epoch, batches, ended)

    def take_sequence(self) -> float:
        """The rolling hash of all collectives since the last call."""
        value, self._sequence = self._sequence, 0
        return float(value)

    def take_wait_seconds(self) -> float:
        """Seconds spent waiting for collectives since the last call."""
        value, self.wait_seconds = self.wait_seconds, 0.0
        return value

    @property
    def waiting_seconds(self) -> float | None:
        """How long this rank has been in the collective that it waits for; 0 = it does something else, None =
        nobody looks (one rank, or no watchdog)."""
        return None if self._watchdog is None else self._watchdog.waiting_seconds

    def advise(self, text: str) -> None:
        """End errors about ranks that part with this, from now on: what may be the reason, and the way
        out."""
        if self._watchdog is not None:
            self._watchdog.advice = f"; {text}"

    def poll_timings(self) -> None:
        """Move measurements that finished on the device into `timings`; never waits."""
        self._stopwatch.poll()

    def _finished(self, sample: CollectiveSample) -> None:
        self.wait_seconds += sample.exposed_seconds
        self.timings.append(sample)
