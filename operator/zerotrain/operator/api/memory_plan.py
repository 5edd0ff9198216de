"""Model of `status.memoryPlan`: the predicted memory of a job, and what its workers then used."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from .base import ATOMIC, Int, Number, ObservedModel

MOST_BYTES = 2**63 - 1
"""Largest integer of the API. A job may name a larger limit, but no status may hold it."""


def _in_range(count: object) -> object:
    if isinstance(count, int) or (isinstance(count, float) and count.is_integer()):
        return max(-MOST_BYTES, min(count, MOST_BYTES))
    return count


Bytes = Annotated[Int, BeforeValidator(_in_range)]

MAX_TIERS = 8
MAX_PHASES = 8
MAX_CHANGES = 16
MAX_RATES = 16


class MemoryPeaks(ObservedModel):
    """Largest values that rank 0 has reported."""

    attempt: Int = 0
    """Attempt that reported them. Peaks of earlier attempts, which may have had another size, do not
    count."""

    gpu_bytes: Bytes | None = None
    """Device memory allocated by the rank, without the driver's context; absent on CPUs."""

    host_bytes: Bytes | None = None
    """Resident host memory of the rank's process."""

    nvme_bytes: Bytes | None = None
    """Spilled bytes of the rank; absent when nothing is spilled."""


class PlannedTier(ObservedModel):
    """Need, limit and margin of one kind of memory."""

    tier: str = ""
    """Kind of memory: gpu, host, nvme; pinned and shared, which are parts of host."""

    per: str = ""
    """Owner of the sizes: rank (each has a GPU of its own), or worker (all of its ranks together)."""

    needed_bytes: Bytes = 0
    """Bytes needed at the peak, estimates included."""

    limit_bytes: Bytes | None = None
    """Bytes available; absent if no limit is known."""

    margin_bytes: Bytes | None = None
    """Bytes left, limitBytes - neededBytes; below zero if it does not fit."""


Tiers = Annotated[tuple[PlannedTier, ...], Field(max_length=MAX_TIERS, json_schema_extra=ATOMIC)]


class PlannedPhase(ObservedModel):
    """Memory of one rank in one phase of a step, on the device that computes: its GPU, or else the host."""

    name: str = ""
    """Name: between steps, forward, backward, or step."""

    engine_bytes: Bytes = 0
    """Bytes of weights, gradients, states and buffers, by formula."""

    activation_bytes: Bytes | None = None
    """Estimated bytes of activations; absent if there are none."""

    host_bytes: Bytes | None = None
    """Host memory besides: offloaded state, its buffers, and activations that are kept there."""

    network_bytes: Bytes | None = None
    """Payload of the collectives that the phase waits for, in bytes."""


class NearestPlan(ObservedModel):
    """Nearest configuration that fits."""

    changes: Annotated[tuple[str, ...], Field(max_length=MAX_CHANGES, json_schema_extra=ATOMIC)] | None = None
    """Changes to make, as they would be written in the configuration or in the job."""

    tiers: Tiers | None = None
    """Memory that it needs."""


class PlannedPace(ObservedModel):
    """Duration of one optimizer step of the whole job by the data sheet of its GPUs."""

    seconds: Number = 0.0
    """Estimated seconds, to four digits."""

    bound_by: str = ""
    """Part of the step that takes longest."""

    missing_rates: (
        Annotated[tuple[str, ...], Field(max_length=MAX_RATES, json_schema_extra=ATOMIC)] | None
    ) = None
    """Speeds that are not known, such as network. What needs them is not counted: the step takes longer."""


class MemoryPlan(ObservedModel):
    """Predicted bytes of one rank at its peak, estimates included, for the size of the current attempt."""

    verdict: str = ""
    """Verdict: Fits; Tight (only if the estimates err on the safe side); DoesNotFit (not even without any
    estimate); or Unknown (a limit or the model's size is not known)."""

    message: str = ""
    """Numbers behind the verdict, and the nearest configuration that fits if this one does not."""

    ranks: Int | None = None
    """World size for which the plan was made."""

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
    """Estimated part of the device or host memory that holds activations."""

    tiers: Tiers | None = None
    """Limit and margin of each kind of memory, of a rank's GPU or of a whole worker."""

    phases: (
        Annotated[tuple[PlannedPhase, ...], Field(max_length=MAX_PHASES, json_schema_extra=ATOMIC)] | None
    ) = None
    """Bytes of a rank by phase of a step."""

    nearest: NearestPlan | None = None
    """Nearest configuration that fits, if this one does not; absent if none was found."""

    pace: PlannedPace | None = None
    """Duration of a step, of `nearest` if there is one; absent unless spec.scheduling.nodeSelector names a
    GPU whose data sheet is known."""

    overridden: bool | None = None
    """Whether the annotation zerotrain.dev/ignore-memory-plan let the job start although the verdict was
    DoesNotFit."""

    observed: MemoryPeaks | None = None
    """Memory that the workers reported; absent until a step is done."""
