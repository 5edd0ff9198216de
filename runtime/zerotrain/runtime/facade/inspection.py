"""Inspection of a running engine: memory, offloading and the spill."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerotrain.contract.memory import (
    MemoryInputs,
    StepTraffic,
    disk_bytes,
    freed_sums,
    gpu_persistent,
    gpu_transient,
    host_bytes,
    memory_inputs,
    step_traffic,
)
from zerotrain.runtime.facade.memory import DeviceMemory, MemoryStatus, OffloadTotals, ProcessMemory
from zerotrain.runtime.facade.state import EngineState
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryKind, Tier
from zerotrain.runtime.zero.sharded_model import ShardedModel, has_lost_spill, used_spill_store
from zerotrain.runtime.zero.watch import DataWatch

if TYPE_CHECKING:  # compiled code, loaded only where something is spilled
    from zerotrain.runtime.spill.probe import VolumeSpace
    from zerotrain.runtime.spill.store import SpillInfo


class Inspection:
    """Memory and spill information of an engine."""

    def __init__(self, state: EngineState, core: ShardedModel, optimizer: ZeroOptimizer) -> None:
        self._state, self._core, self._optimizer = state, core, optimizer
        self._traffic_of: tuple[ModelLayout, StepTraffic] | None = None

    def memory_status(self) -> MemoryStatus:
        """Return this rank's memory; see `Engine.memory_status`."""
        self._core.updates.wait()
        inputs = self._memory_inputs()
        persistent = gpu_persistent(inputs).total_bytes
        live = {kind: self._core.ledger.live_bytes(kind) for kind in MemoryKind}
        return MemoryStatus(
            live_bytes={str(kind): size for kind, size in live.items()},
            peak_bytes={str(kind): self._core.ledger.peak_bytes(kind) for kind in MemoryKind},
            phase_peak_bytes=self._core.ledger.phase_peaks(),
            planned_persistent_bytes=persistent - freed_sums(inputs).total_bytes,
            planned_peak_bytes=persistent + gpu_transient(inputs).peak_bytes,
            planned_host_bytes=host_bytes(inputs).total_bytes,
            planned_disk_bytes=disk_bytes(inputs),
            tier_bytes={
                str(tier): sum(size for kind, size in live.items() if kind.tier is tier) for tier in Tier
            },
            offload=self.offload_totals(),
            process=ProcessMemory.now(),
            device=DeviceMemory.now(),
        )

    def offload_totals(self) -> OffloadTotals:
        """Return the totals of offloading; see `Engine.offload_totals`."""
        updates, traffic = self._state.global_steps - self._state.skipped_steps, self._traffic()
        moved = OffloadTotals(
            h2d_bytes=updates * traffic.pcie_up_bytes, d2h_bytes=updates * traffic.pcie_down_bytes
        )
        spill_store = used_spill_store(self._core)
        if spill_store is None:
            return moved
        faults, totals, probed = spill_store.faults, spill_store.totals, spill_store.probed
        moved = replace(
            moved,
            spill_wait_seconds=totals.wait_s - probed.wait_s,
            spill_pass_seconds=totals.total_s - probed.total_s,
            spill_pass_bytes=totals.num_bytes - probed.num_bytes,
            spill_io_errors=faults.io_errors,
            spill_auth_failures=faults.auth_failures,
        )
        if faults.io_errors or has_lost_spill(self._core):
            return moved  # its file can no longer be queried
        return replace(
            moved,
            spill_read_bytes=spill_store.file.bytes_read - probed.bytes_read,
            spill_written_bytes=spill_store.file.bytes_written - probed.bytes_written,
        )

    def probe_spill(self) -> float | None:
        """Return the bytes per second of the spill file; see `Engine.probe_spill`."""
        from zerotrain.runtime.spill.probe import probe

        spill_store = used_spill_store(self._core)
        if spill_store is not None:
            self._optimizer.registry.make_deferred()
        return None if spill_store is None else probe(spill_store)

    def spill_space(self) -> VolumeSpace | None:
        """Return free space and size of the spill file's volumes; None without a spill."""
        from zerotrain.runtime.spill.probe import space

        spill_store = used_spill_store(self._core)
        return None if spill_store is None else space(spill_store)

    def _traffic(self) -> StepTraffic:
        layout = self._core.layout
        if self._traffic_of is None or self._traffic_of[0] is not layout:
            self._traffic_of = layout, step_traffic(self._memory_inputs())
        return self._traffic_of[1]

    @property
    def spill_info(self) -> SpillInfo | None:
        """Properties of this rank's spill file; see `Engine.spill_info`."""
        spill_store = used_spill_store(self._core)
        return None if spill_store is None else spill_store.info

    def _memory_inputs(self) -> MemoryInputs:
        spill = self.spill_info
        return memory_inputs(
            self._state.config,
            unit_sizes(self._core.layout),
            shares_memory=self._core.comm.shares_memory,
            ranks_per_node=self._core.comm.nodes.ranks_per_node,
            on_host=self._core.comm.device.type == "cpu",
            is_encrypted=spill is None or spill.encryption != "None",
        )

    def watch_data_writes(self, enabled: bool) -> None:
        """Begin or end the comparison of weights; see `Engine.watch_data_writes`."""
        writes = self._core.writes
        if writes.watch is not None:
            writes.watch.end()
        writes.watch = DataWatch(self._core) if enabled else None
