"""`status.memoryPlan`: what a job was predicted to need, and what its workers then took."""

from __future__ import annotations

from .base import Int, ObservedModel


class MemoryPeaks(ObservedModel):
    """The most that rank 0 reported so far."""

    attempt: Int = 0
    """Attempt that reported it. Peaks of earlier attempts, which may have had another size, do not count."""

    gpu_bytes: Int | None = None
    """Device memory allocated by the rank, without the driver's context; absent on CPUs."""

    host_bytes: Int | None = None
    """Resident host memory of the rank's process."""

    nvme_bytes: Int | None = None
    """Spilled bytes of the rank; absent when nothing is spilled."""


class MemoryPlan(ObservedModel):
    """Predicted bytes of one rank at its peak, estimates included, for the size of the current attempt."""

    verdict: str = ""
    """Fits; Tight (only if the estimates err on the safe side); DoesNotFit (not even without any estimate);
    or Unknown (a limit or the model's size is not known)."""

    message: str = ""
    """The numbers behind the verdict, and the nearest configuration that fits where it does not."""

    ranks: Int | None = None
    """World size that was planned for."""

    gpu_bytes: Int | None = None
    """Device memory of a rank."""

    host_bytes: Int | None = None
    """Host memory of a rank, pinned and shared memory included."""

    pinned_bytes: Int | None = None
    """Page-locked part of the host memory."""

    shared_bytes: Int | None = None
    """Part of the host memory that the ranks of a worker read from each other."""

    nvme_bytes: Int | None = None
    """Spilled bytes of a rank."""

    network_bytes: Int | None = None
    """Payload that a rank's collectives carry in one optimizer step."""

    activation_bytes: Int | None = None
    """Part of the device or host memory that is activations: an estimate."""

    overridden: bool | None = None
    """true: the verdict was DoesNotFit, and the annotation zerotrain.dev/ignore-memory-plan let the job
    start."""

    observed: MemoryPeaks | None = None
    """What the workers reported; absent until a step is done."""
