"""Memory in use: by the engine's own count, by its formula, by the process, by the device.

`see_memory_usage` and `memory_status` are public functions with DeepSpeed's names; the engine's method
`memory_status` (facade/inspection.py) adds the engine's own numbers.
"""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from zerotrain.runtime.zero.ledger import MemoryKind, Tier

MIB = 1 << 20
_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Memory of this process as the kernel counts it, in bytes; 0 where the kernel gives no number."""

    rss_bytes: int
    """Resident pages."""
    pss_bytes: int
    """Resident pages with shared ones divided by their users: can be summed over the ranks of a host."""
    peak_rss_bytes: int
    """Largest resident size so far."""

    @classmethod
    def now(cls) -> ProcessMemory:
        """Read the numbers from /proc."""
        rollup, status = _kilobytes(_ROLLUP), _kilobytes(_STATUS)
        return cls(
            rss_bytes=rollup.get("Rss", status.get("VmRSS", 0)),
            pss_bytes=rollup.get("Pss", 0),
            peak_rss_bytes=status.get("VmHWM", 0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of this rank's CUDA device as torch's caching allocator counts it, in bytes."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int

    @classmethod
    def now(cls) -> DeviceMemory | None:
        """Return the present numbers; None without CUDA."""
        if not torch.cuda.is_available():
            return None
        return cls(
            allocated_bytes=torch.cuda.memory_allocated(),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        )


def peak_memory_bytes() -> int:
    """Return the peak memory of this process so far: on the accelerator if there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resident_peak_bytes()


def resident_peak_bytes() -> int:
    """Return the peak resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTotals:
    """Transfers of offloading since the engine was made, on this rank."""

    h2d_bytes: int = 0
    """Bytes from host to accelerator, by the byte formula times the updates."""
    d2h_bytes: int = 0
    spill_read_bytes: int = 0
    """Bytes read from the spill file, counted where the file is read."""
    spill_written_bytes: int = 0
    spill_wait_seconds: float = 0.0
    """Seconds in which an update waited for the drive alone."""
    spill_pass_seconds: float = 0.0
    """Seconds of completed passes over the spill file."""
    spill_pass_bytes: int = 0
    """Bytes read and written by these passes."""
    spill_io_errors: int = 0
    """Number of reads and writes that failed in the operating system."""
    spill_auth_failures: int = 0
    """Number of reads whose bytes failed authentication; a second read may have passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStatus:
    """Memory of one rank in bytes; `str()` is a table."""

    live_bytes: Mapping[str, int]
    """Present sizes of the engine's buffers, by kind (`zero/ledger.py`)."""
    peak_bytes: Mapping[str, int]
    """Largest sizes of the buffers so far, by kind; the peaks may be of different moments."""
    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Largest sum of all kinds by phase: start, forward, backward, step."""
    planned_persistent_bytes: int = 0
    """Bytes held between steps, by the byte formula."""
    planned_peak_bytes: int = 0
    """Peak of a step without activations, by the byte formula."""
    planned_host_bytes: int = 0
    """Host memory for offloaded values, by the byte formula."""
    planned_disk_bytes: int = 0
    """Size of the spill, by the byte formula."""
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    """Present sizes of all buffers by tier: device, host, disk."""
    offload: OffloadTotals = OffloadTotals()
    process: ProcessMemory
    device: DeviceMemory | None = None

    @property
    def persistent_bytes(self) -> int:
        """Present size of all buffers in memory."""
        return sum(size for kind, size in self.live_bytes.items() if MemoryKind(kind).tier is not Tier.DISK)

    def __str__(self) -> str:
        rows = [f"{'engine buffers':<24}{'now':>12}{'peak':>12}"]
        for kind, live in self.live_bytes.items():
            rows.append(f"  {kind:<22}{_mib(live):>12}{_mib(self.peak_bytes[kind]):>12}")
        peak = max(self.phase_peak_bytes.values(), default=0)
        rows.append(f"  {'all':<22}{_mib(self.persistent_bytes):>12}{_mib(peak):>12}")
        planned = _mib(self.planned_persistent_bytes), _mib(self.planned_peak_bytes)
        rows.append(f"  {'by the formula':<22}{planned[0]:>12}{planned[1]:>12}")
        if self.planned_host_bytes or self.planned_disk_bytes:
            host, disk = _mib(self.planned_host_bytes), _mib(self.planned_disk_bytes)
            rows.append(f"  {'offloaded, by formula':<22}{host:>12} of memory{disk:>12} of disk")
        tiers = {name: size for name, size in self.tier_bytes.items() if size}
        rows += [f"  {'in tier ' + name:<22}{_mib(size):>12}" for name, size in tiers.items()]
        rows += [f"  {'peak in ' + name:<34}{_mib(size):>12}" for name, size in self.phase_peak_bytes.items()]
        moved = self.offload
        if moved.spill_read_bytes or moved.spill_written_bytes:
            rows.append(
                f"  spill: read {_mib(moved.spill_read_bytes)}, written {_mib(moved.spill_written_bytes)}, "
                f"waited for {moved.spill_wait_seconds:.3f} s"
            )
        return "\n".join([*rows, process_line(self.process, self.device)])


def process_line(process: ProcessMemory, device: DeviceMemory | None) -> str:
    """Return one line on the process and, where there is one, the device."""
    line = (
        f"process: resident {_mib(process.rss_bytes)}, proportional {_mib(process.pss_bytes)}, "
        f"peak {_mib(process.peak_rss_bytes)}"
    )
    if device is None:
        return line
    return (
        f"{line}; CUDA: allocated {_mib(device.allocated_bytes)} (peak {_mib(device.peak_allocated_bytes)}), "
        f"reserved {_mib(device.reserved_bytes)} (peak {_mib(device.peak_reserved_bytes)})"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of this process on rank 0, after a garbage collection; do nothing unless `force`.

    On CUDA the peaks are reset afterwards. Without `force` it costs nothing, so calls may stay in a script.
    """
    if not force or _rank() != 0:
        return
    gc.collect()
    print(f"{message} | {process_line(ProcessMemory.now(), DeviceMemory.now())}", flush=True)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def memory_status(msg: str = "", print_rank: int = -1, reset_max: bool = False) -> ProcessMemory:
    """Print and return the memory of this process on rank `print_rank`; -1 = print on every rank.

    `reset_max` resets CUDA's peaks first.
    """
    if reset_max and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    process = ProcessMemory.now()
    if print_rank in (-1, _rank()):
        print(f"rank {_rank()} {msg} | {process_line(process, DeviceMemory.now())}", flush=True)
    return process


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the `Name:  123 kB` lines of a file in /proc, as bytes; empty where the system has no such
    file."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
