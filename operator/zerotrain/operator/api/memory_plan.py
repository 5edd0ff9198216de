"""`status.memoryPlan`: what a job was predicted to need, and what its workers then took."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from .base import ATOMIC, Int, Number, ObservedModel

MOST_BYTES = 2**63 - 1
"""What an integer of the API holds. A job may name a larger limit, but no status may hold that."""


def _in_range(count: int) -> int:
    return max(-MOST_BYTES, min(count, MOST_BYTES))


Bytes = Annotated[Int, AfterValidator(_in_range)]

MAX_TIERS = 8
MAX_PHASES = 8
MAX_CHANGES = 16
MAX_RATES = 16


class MemoryPeaks(ObservedModel):
    """The most that rank 0 reported so far."""

    attempt: Int = 0
    """Attempt that reported it. Peaks of earlier attempts, which may have had another size, do not count."""

    gpu_bytes: Bytes | None = None
    """Device memory allocated by the rank, without the driver's context; absent on CPUs."""

    host_bytes: Bytes | None = None
    """Resident host memory of the rank's process."""

    nvme_bytes: Bytes | None = None
    """Spilled bytes of the rank; absent when nothing is spilled."""


class PlannedTier(ObservedModel):
    """One kind of memory: what is needed of it, what there is, and what is left."""

    tier: str = ""
    """gpu, host, nvme; pinned and shared, which are parts of host."""

    per: str = ""
    """What the sizes are of: rank (each has a GPU of its own), or worker (all of its ranks together)."""

    needed_bytes: Bytes = 0
    """At the peak, estimates included."""

    limit_bytes: Bytes | None = None
    """What there is; absent where nothing says so."""

    margin_bytes: Bytes | None = None
    """limitBytes - neededBytes; below zero where it does not fit."""


Tiers = Annotated[tuple[PlannedTier, ...], Field(max_length=MAX_TIERS, json_schema_extra=ATOMIC)]


class PlannedPhase(ObservedModel):
    """Memory of one rank in one phase of a step, on the device that computes: its GPU, or else the host."""

    name: str = ""
    """between steps, forward, backward, or step."""

    engine_bytes: Bytes = 0
    """Weights, gradients, states and buffers, by formula."""

    activation_bytes: Bytes | None = None
    """Estimated; absent where there are none."""

    host_bytes: Bytes | None = None
    """Host memory beside that: what is offloaded, its buffers, activations that are kept there."""

    network_bytes: Bytes | None = None
    """Payload of the collectives that the phase waits for."""


class NearestPlan(ObservedModel):
    """The nearest configuration that fits."""

    changes: Annotated[tuple[str, ...], Field(max_length=MAX_CHANGES, json_schema_extra=ATOMIC)] | None = None
    """What to change, as it would be written in the configuration or in the job."""

    tiers: Tiers | None = None
    """What it needs."""


class PlannedPace(ObservedModel):
    """One optimizer step of the whole job by the data sheet of its GPUs."""

    seconds: Number = 0.0
    """Estimated, to four digits."""

    bound_by: str = ""
    """What takes longest of it."""

    missing_rates: (
        Annotated[tuple[str, ...], Field(max_length=MAX_RATES, json_schema_extra=ATOMIC)] | None
    ) = None
    """Speeds that nobody knows, such as network. What needs them is not counted: the step takes longer."""


class MemoryPlan(ObservedModel):
    """Predicted bytes of one rank at its peak, estimates included, for the size of the current attempt."""

    verdict: str = ""
    """Fits; Tight (only if the estimates err on the safe side); DoesNotFit (not even without any estimate);
    or Unknown (a limit or the model's size is not known)."""

    message: str = ""
    """The numbers behind the verdict, and the nearest configuration that fits where it does not."""

    ranks: Int | None = None
    """World size that was planned for."""

    gpu_bytes: Bytes | None = None
    """Device memory of a rank."""

    host_bytes: Bytes | None = None
    """Host memory of a rank, pinned and shared memory included."""

    pinned_bytes: Bytes | None = None
    """Page-locked part of the host memory."""

    shared_bytes: Bytes | None = None
    """Part of the host memory that the ranks of a worker read from each other."""

    nvme_bytes: Bytes | None = None
    """Spilled bytes of a rank."""

    network_bytes: Bytes | None = None
    """Payload that a rank's collectives carry in one optimizer step."""

    activation_bytes: Bytes | None = None
    """Part of the device or host memory that is activations: an estimate."""

    tiers: Tiers | None = None
    """Limit and margin of each kind of memory, of a rank's GPU or of a whole worker."""

    phases: (
        Annotated[tuple[PlannedPhase, ...], Field(max_length=MAX_PHASES, json_schema_extra=ATOMIC)] | None
    ) = None
    """Bytes of a rank by phase of a step."""

    nearest: NearestPlan | None = None
    """The nearest configuration that fits, where this one does not; absent where none was found."""

    pace: PlannedPace | None = None
    """How long a step takes, of `nearest` where there is one; absent unless
    spec.scheduling.nodeSelector names a GPU whose data sheet is known."""

    overridden: bool | None = None
    """true: the verdict was DoesNotFit, and the annotation zerotrain.dev/ignore-memory-plan let the job
    start."""

    observed: MemoryPeaks | None = None
    """What the workers reported; absent until a step is done."""
