"""The record that ranks exchange at a step boundary, and what must be equal in it.

It carries everything on which they must agree: the gradient norm (summed in rank order, so its bits are the
same everywhere) unless that stays on the devices, whether a gradient was not finite, whether a rank wants to
stop, and hashes that show whether the ranks issued the same collectives.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from zerotrain.runtime.comm.group import Comm, CommError

RELAYOUT_MARK = -1.0
"""Value in place of a step record's sum of squares: the rank rebuilds its units instead of taking a step."""

STOP, LATE_GRADIENTS = 1, 2
"""Flags of a step record: the rank wants to stop; it holds gradients that were not sent (see
zero/reduce.py)."""

SAVE_STAGE = 4
"""Factor, in the flags of a step record, of the stage (0 to 3) of a checkpoint written in the background."""

OUTSIDE_WRITES = 16
"""Flag of a step record: the rank wrote into parameters since the last step (see zero/writes.py)."""
ON_DEVICE = 32
"""Flag of a step record: the rank's sum of squares is on its device, and the record has none."""
REST = 64
"""Factor, in the flags of a step record, of the number by which the gradients are still to be divided
(optim/loss_scale.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Record that each rank sends at a step, 64 bytes; see the module's text."""

    sum_squares: float
    not_finite: float
    flags: float
    """Sum of `STOP`, `LATE_GRADIENTS`, `SAVE_STAGE` times the stage, `OUTSIDE_WRITES`, `ON_DEVICE` and
    `REST` times the rest."""
    sequence: float
    unit_order: float
    step_seconds: float
    compute_seconds: float
    wait_seconds: float


def exchange_records(record: StepRecord, comm: Comm) -> list[StepRecord]:
    """Return the records of all ranks. Raises CommError when the ranks did not issue the same collectives."""
    names = StepRecord.__slots__
    raw = comm.gather_record(astuple(record))
    rows = [StepRecord(**dict(zip(names, row, strict=True))) for row in raw]
    changed = [rank for rank, row in enumerate(rows) if row.sum_squares == RELAYOUT_MARK]
    if changed:
        raise CommError(
            f"ranks {changed} changed requires_grad of parameters since the last step and rank "
            f"{comm.rank} did not; freeze and unfreeze the same parameters on every rank"
        )
    mismatched = [rank for rank, row in enumerate(rows) if row.sequence != rows[0].sequence]
    if mismatched:
        raise CommError(
            f"ranks {mismatched} issued other collectives than rank 0 since the last step; "
            "the model must call the same modules in the same order on every rank (where ranks visit "
            "different experts at stage 3, name the module that holds them in "
            "zero_optimization.leaf_module)"
        )
    if len({int(row.flags) // REST for row in rows}) > 1:
        raise CommError(
            "some ranks began the step with a bfloat16 loss and others with one of another dtype; return "
            "a loss of one dtype on every rank, for example loss.float()"
        )
    return rows
