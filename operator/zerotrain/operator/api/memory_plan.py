"""What the memory planner predicts of a job, in its status."""

from __future__ import annotations

from .base import Int, ObservedModel


class MemoryPlan(ObservedModel):
    """Predicted bytes of each rank."""

    gpu_bytes: Int | None = None
    """Device memory of a rank."""

    host_bytes: Int | None = None
    """Host memory of a rank, pinned memory included."""

    pinned_bytes: Int | None = None
    """Page-locked part of the host memory."""

    nvme_bytes: Int | None = None
    """Spilled bytes of a rank."""
