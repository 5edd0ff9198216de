"""Exact byte counts of everything the engine allocates, by kind, so that tests can check the byte
formulas."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from threading import Lock

import torch


class Tier(StrEnum):
    """Location of a buffer."""

    DEVICE = "device"  # the device that computes the model; if that is the CPU, it is host memory, too
    HOST = "host"
    DISK = "disk"


class MemoryKind(StrEnum):
    """Purpose of a buffer."""

    PARAMS = "params"  # trainable weights in compute precision: a replica or a shard
    FROZEN = "frozen"  # frozen weights, likewise
    SECONDARY = "secondary"  # shards that neighbouring ranks keep of each other's weights (hpZ)
    GRADS = "grads"  # accumulated gradients
    STATES = "states"  # master weights and moments (fp32 weights that are their own master count as params)
    GATHERED = "gathered"  # full weights of units that are live now
    AUTOGRAD = "autograd"  # full gradients of units that are in backward now
    REDUCE = "reduce"  # receive buffers of gradient exchanges
    SNAPSHOT = "snapshot"  # copy of the state, in host memory, that a checkpoint is written from
    HOST_STATES = "host_states"  # offloaded master weights (or their remainders) and moments
    HOST_GRADS = "host_grads"  # gradients of offloaded states: their sums, or on their way
    HOST_PARAMS = "host_params"  # offloaded weights
    RING = "ring"  # tiles between memory and the spill file, and weights between host and device
    TAGS = "tags"  # proofs that a spilled chunk is the one that was written last
    SPILL = "spill"  # the spill file itself

    @property
    def tier(self) -> Tier:
        """Location of buffers of this kind."""
        return _TIERS.get(self, Tier.DEVICE)


_HOST = (
    MemoryKind.SNAPSHOT,
    MemoryKind.HOST_STATES,
    MemoryKind.HOST_GRADS,
    MemoryKind.HOST_PARAMS,
    MemoryKind.RING,
    MemoryKind.TAGS,
)
_TIERS = {**dict.fromkeys(_HOST, Tier.HOST), MemoryKind.SPILL: Tier.DISK}

PERSISTENT = (
    MemoryKind.PARAMS,
    MemoryKind.FROZEN,
    MemoryKind.SECONDARY,
    MemoryKind.GRADS,
    MemoryKind.STATES,
    MemoryKind.HOST_STATES,
    MemoryKind.HOST_GRADS,
    MemoryKind.HOST_PARAMS,
    MemoryKind.TAGS,
)
TRANSIENT = (MemoryKind.GATHERED, MemoryKind.AUTOGRAD, MemoryKind.REDUCE)


class MemoryLedger:
    """Live and peak bytes by kind; `peak_bytes` is the peak of the sum, not the sum of peaks.

    Bytes on disk are counted only by kind: sums are of memory.
    """

    phase = "start"
    """Current phase of the engine; peaks are also kept by phase."""

    def __init__(self) -> None:
        self._live: Counter[MemoryKind] = Counter()
        self._peak: Counter[MemoryKind] = Counter()
        self._in_tier = dict.fromkeys(Tier, 0)
        self._peak_total = 0
        self._phase_peak: dict[str, int] = {}
        self._tier_peak: dict[tuple[str, Tier], int] = {}
        self._lock = Lock()  # updates in the background count the memory they borrow

    def add(self, kind: MemoryKind, num_bytes: int) -> None:
        """Count an allocation (negative: a release)."""
        tier = kind.tier
        with self._lock:
            self._live[kind] += num_bytes
            self._in_tier[tier] += num_bytes
            if num_bytes > 0:
                self._peak[kind] = max(self._peak[kind], self._live[kind])
                self._note(tier)

    def _note(self, *tiers: Tier) -> None:
        total = self._in_tier[Tier.DEVICE] + self._in_tier[Tier.HOST]
        self._peak_total = max(self._peak_total, total)
        self._phase_peak[self.phase] = max(self._phase_peak.get(self.phase, 0), total)
        for tier in tiers:
            key = self.phase, tier
            self._tier_peak[key] = max(self._tier_peak.get(key, 0), self._in_tier[tier])

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        with self._lock:
            self.phase = phase
            self._note(*Tier)

    def count(self, kind: MemoryKind, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that lives as long as the engine, and return it."""
        self.add(kind, tensor.numel() * tensor.element_size())
        return tensor

    def live_bytes(self, kind: MemoryKind | None = None, *, tier: Tier | None = None) -> int:
        """Return the bytes allocated now, of one kind, of one tier, or of all memory."""
        if kind is not None:
            return self._live[kind]
        in_tier = self._in_tier
        return in_tier[Tier.DEVICE] + in_tier[Tier.HOST] if tier is None else in_tier[tier]

    def peak_bytes(self, kind: MemoryKind | None = None) -> int:
        """Return the largest `live_bytes` since the start or the last `reset_peak`."""
        return self._peak_total if kind is None else self._peak[kind]

    def phase_peaks(self) -> dict[str, int]:
        """Return the largest sum of live bytes by phase, since the start or the last `reset_peak`."""
        return dict(self._phase_peak)

    def tier_peaks(self) -> dict[tuple[str, Tier], int]:
        """Return the largest sum of live bytes by phase and tier, since the start or the last
        `reset_peak`."""
        return dict(self._tier_peak)

    @property
    def persistent_bytes(self) -> int:
        """Bytes of memory held between steps."""
        return sum(self._live[kind] for kind in PERSISTENT)

    @property
    def transient_bytes(self) -> int:
        """Bytes of live units and communication, now."""
        return sum(self._live[kind] for kind in TRANSIENT)

    def reset_peak(self) -> None:
        """Restart the measurement of peaks from what is live."""
        with self._lock:
            self._peak = self._live.copy()
            self._peak_total = self._in_tier[Tier.DEVICE] + self._in_tier[Tier.HOST]
            self._phase_peak.clear()
            self._tier_peak.clear()
