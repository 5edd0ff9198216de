"""Looking into a running engine: memory, times, a call after every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from zerotrain.contract.memory import gpu_persistent, gpu_transient, memory_inputs
from zerotrain.runtime.facade.memory import DeviceMemory, MemoryStatus, ProcessMemory
from zerotrain.runtime.facade.parts import EngineParts
from zerotrain.runtime.facade.steplog import StepLog
from zerotrain.runtime.offload.fit import unit_sizes
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.zero.ledger import Kind

StepHook = Callable[[StepResult], None]


class Inspection(EngineParts):
    """What the engine tells of itself."""

    _step_hooks: OrderedDict[int, StepHook]
    _step_log: StepLog
    _global_samples: int

    def memory_status(self) -> MemoryStatus:
        """This rank's memory: buffers by kind, peaks by phase, the formula beside them, process, device."""
        inputs = memory_inputs(
            self.config,
            unit_sizes(self.core.layout),
            shares_memory=self.comm.shares_memory,
            ranks_per_node=self.comm.nodes.ranks_per_node,
            on_host=self.device.type == "cpu",
        )
        persistent = gpu_persistent(inputs).total_bytes
        return MemoryStatus(
            live_bytes={str(kind): self.memory.live_bytes(kind) for kind in Kind},
            peak_bytes={str(kind): self.memory.peak_bytes(kind) for kind in Kind},
            phase_peak_bytes=self.memory.phase_peaks(),
            planned_persistent_bytes=persistent,
            planned_peak_bytes=persistent + gpu_transient(inputs).peak_bytes,
            process=ProcessMemory.now(),
            device=DeviceMemory.now(),
        )

    def register_step_hook(self, hook: StepHook) -> RemovableHandle:
        """Call `hook(result)` after every step boundary, skipped ones included; `handle.remove()` ends it.

        Hooks run in the order of their registration, when everything of the step is done: they may save,
        evaluate or read states. What one raises comes out of `engine.step()`.
        """
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def _begin_inspection(self) -> None:
        self._step_hooks = OrderedDict()
        self._global_samples = 0
        self._step_log = StepLog(self.config)

    def _settle_device(self) -> None:
        """With `wall_clock_breakdown` on CUDA, a phase ends when the device is done with it."""
        if self.config.wall_clock_breakdown and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _after_step(self, result: StepResult) -> None:
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
