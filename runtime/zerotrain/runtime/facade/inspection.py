"""Inspection of a running engine: memory, times, and hooks at every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from zerotrain.contract.memory import (
    MemoryInputs,
    StepTraffic,
    disk_bytes,
    gpu_persistent,
    gpu_transient,
    host_bytes,
    memory_inputs,
    step_traffic,
)
from zerotrain.runtime.facade.memory import DeviceMemory, MemoryStatus, OffloadTotals, ProcessMemory
from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.facade.steplog import StepLog
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.optim.torch_face import after_step, before_step
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryKind, Tier
from zerotrain.runtime.zero.sharded_model import has_lost_spill, used_spill_store
from zerotrain.runtime.zero.watch import DataWatch

if TYPE_CHECKING:  # compiled code, loaded only where something is spilled
    from zerotrain.runtime.spill.probe import VolumeSpace
    from zerotrain.runtime.spill.store import SpillInfo

StepHook = Callable[[StepResult], None]


class Inspection(EngineParts):
    """Memory, spill and step information of an engine."""

    _step_hooks: OrderedDict[int, StepHook]
    _update_hooks: OrderedDict[int, StepHook]
    _step_log: StepLog
    _global_samples: int
    _traffic_of: tuple[ModelLayout, StepTraffic] | None

    def memory_status(self) -> MemoryStatus:
        """Return this rank's memory: buffers by kind and tier, peaks by phase, the planned sizes, process,
        device."""
        self.core.updates.wait()
        inputs = self._memory_inputs()
        persistent = gpu_persistent(inputs).total_bytes
        live = {kind: self.memory.live_bytes(kind) for kind in MemoryKind}
        return MemoryStatus(
            live_bytes={str(kind): size for kind, size in live.items()},
            peak_bytes={str(kind): self.memory.peak_bytes(kind) for kind in MemoryKind},
            phase_peak_bytes=self.memory.phase_peaks(),
            planned_persistent_bytes=persistent,
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
        """Return the totals of offloading so far on this rank, without those of `probe_spill`. It does not
        wait for transfers in progress, and works also after the spill was lost."""
        updates, traffic = self.global_steps - self.skipped_steps, self._traffic()
        moved = OffloadTotals(
            h2d_bytes=updates * traffic.pcie_up_bytes, d2h_bytes=updates * traffic.pcie_down_bytes
        )
        spill_store = used_spill_store(self.core)
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
        if faults.io_errors or has_lost_spill(self.core):
            return moved  # its file can no longer be queried
        return replace(
            moved,
            spill_read_bytes=spill_store.file.bytes_read - probed.bytes_read,
            spill_written_bytes=spill_store.file.bytes_written - probed.bytes_written,
        )

    def probe_spill(self) -> float | None:
        """Return the bytes per second of a pass over a part of the spill file at the drive's present speed;
        None where no optimizer state is spilled. Takes up to a second on a slow drive. Do not call it while
        an update is running. It makes states that the first backward pass would otherwise make."""
        from zerotrain.runtime.spill.probe import probe

        spill_store = used_spill_store(self.core)
        if spill_store is not None:
            self.zero_optimizer.registry.make_deferred()
        return None if spill_store is None else probe(spill_store)

    def spill_space(self) -> VolumeSpace | None:
        """Return free space and size of the spill file's volumes; None without a spill."""
        from zerotrain.runtime.spill.probe import space

        spill_store = used_spill_store(self.core)
        return None if spill_store is None else space(spill_store)

    def _traffic(self) -> StepTraffic:
        layout = self.core.layout
        if self._traffic_of is None or self._traffic_of[0] is not layout:
            self._traffic_of = layout, step_traffic(self._memory_inputs())
        return self._traffic_of[1]

    @property
    def spill_info(self) -> SpillInfo | None:
        """Properties of this rank's spill file: I/O engine, encryption, folders, reasons. None without one,
        also where the configuration names a drive and nothing is spilled there."""
        spill_store = used_spill_store(self.core)
        return None if spill_store is None else spill_store.info

    def _memory_inputs(self) -> MemoryInputs:
        spill = self.spill_info
        return memory_inputs(
            self.config,
            unit_sizes(self.core.layout),
            shares_memory=self.comm.shares_memory,
            ranks_per_node=self.comm.nodes.ranks_per_node,
            on_host=self.device.type == "cpu",
            is_encrypted=spill is None or spill.encryption != "None",
        )

    def register_step_hook(self, hook: StepHook, *, before_update: bool = False) -> RemovableHandle:
        """Call `hook(result)` after every step boundary, skipped ones included; `handle.remove()` ends it.

        Hooks run in the order of their registration, when the step is complete: they may save, evaluate or
        read states. With `before_update` they run when the step begins and nothing has changed yet:
        `get_full_grad` and `set_full_grad` work then, as does clipping; of the result only step, rate and
        loss scale are known. `engine.step()` raises the exceptions of hooks.
        """
        hooks = self._update_hooks if before_update else self._step_hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def watch_data_writes(self, enabled: bool = True) -> None:
        """Compare the weights at every step with those that the engine wrote, to find writes through `.data`
        (`p.data.clamp_()`), which torch does not count. For debugging: call it on every rank, between steps.

        `step()` then raises OutsideWrite, naming parameters. Each comparison reads the weights once, and
        waits for updates in the background.
        """
        if self.core.writes.watch is not None:
            self.core.writes.watch.end()
        self.core.writes.watch = DataWatch(self.core) if enabled else None

    def _begin_inspection(self) -> None:
        self._step_hooks, self._update_hooks = OrderedDict(), OrderedDict()
        self._global_samples = 0
        self._traffic_of = None
        self._step_log = StepLog(self.config)

    def _before_update(self) -> None:
        """Run the optimizer's and the user's hooks at the beginning of a boundary's step."""
        before_step(self.optimizer)
        if self._update_hooks:
            scale, lr = self.pipeline.scaler.scale, self.optimizer.lr
            coming = StepResult(step=self.global_steps + 1, at_boundary=True, loss_scale=scale, lr=lr)
            for hook in list(self._update_hooks.values()):
                hook(coming)

    def _settle_device(self) -> None:
        """Wait for the device at the end of a phase, with `wall_clock_breakdown` on CUDA."""
        if self.config.wall_clock_breakdown and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _after_step(self, result: StepResult) -> None:
        after_step(self.optimizer)
        if self.core.writes.watch is not None:
            self.core.writes.watch.remember()
        samples = self.config.batch.train_batch_size
        self._global_samples += samples
        lines = self._step_log.add(
            result,
            samples=samples,
            skipped_steps=self.skipped_steps,
            phase_peaks=self.memory.phase_peaks(),
        )
        if self.rank == 0:
            for line in lines:
                print(line, flush=True)
        for hook in list(self._step_hooks.values()):
            hook(result)
