"""Bytes that one rank needs, by tier: the planner's formulas, as pure functions.

Symbols of the ZeRO papers have brackets. All sizes are of *one rank*; "numel" counts elements after padding.
With [Psi] trainable and [Phi] frozen elements, [N] ranks, [c] compute, [a] stored gradient, [r] reduction and
[K] optimizer bytes per element, the persistent part is

    stage 0: (c + a + K) Psi            stage 2: c Psi + (a + K) Psi / N
    stage 1: (c + a) Psi + K Psi / N    stage 3: (c + a + K) Psi / N + c n_root (1 - 1 / N)

plus c Phi for frozen parameters (c Phi / N at stage 3). Offloaded parts move from the accelerator to host
memory and disk (`tiers.py`), in whole units (`moved.py`); gradients of offloaded states move to host memory
if a rank keeps its own part of them alone, as stages 2 and 3 do, and stage 1 with one micro-batch. The
operator's admission, the planner, the engine before it allocates and its own accounting test use the
formulas, so that a job that will not fit is refused with the numbers that it would reach.
"""

from .breakdown import MemoryBreakdown, breakdown
from .gpu import FreedSums, GpuPersistent, GpuTransient, freed_sums, gpu_persistent, gpu_transient
from .inputs import ADAM_STATE_BYTES, MemoryInputs, Offloaded, fitting, padded_numel
from .model import (
    gpt_modules,
    gpt_parameter_count,
    gpt_units,
    memory_inputs,
    optimizer_state_bytes,
    small_parameters,
)
from .modules import MIN_UNIT_NUMEL, ModuleSize, arrange_units
from .moved import (
    OffloadTiers,
    kept_states,
    offload_tiers,
    offloaded_units,
    shards_parameters,
    updates_just_in_time,
)
from .sizes import UnitSize
from .tiers import (
    HostBytes,
    NetworkPhases,
    StepTraffic,
    disk_bytes,
    host_bytes,
    optimizer_disk_bytes,
    snapshot_bytes,
    step_traffic,
)

__all__ = [
    "ADAM_STATE_BYTES",
    "MIN_UNIT_NUMEL",
    "FreedSums",
    "GpuPersistent",
    "GpuTransient",
    "HostBytes",
    "MemoryBreakdown",
    "MemoryInputs",
    "ModuleSize",
    "NetworkPhases",
    "OffloadTiers",
    "Offloaded",
    "StepTraffic",
    "UnitSize",
    "arrange_units",
    "breakdown",
    "disk_bytes",
    "fitting",
    "freed_sums",
    "gpt_modules",
    "gpt_parameter_count",
    "gpt_units",
    "gpu_persistent",
    "gpu_transient",
    "host_bytes",
    "kept_states",
    "memory_inputs",
    "offload_tiers",
    "offloaded_units",
    "optimizer_disk_bytes",
    "optimizer_state_bytes",
    "padded_numel",
    "shards_parameters",
    "small_parameters",
    "snapshot_bytes",
    "step_traffic",
    "updates_just_in_time",
]
