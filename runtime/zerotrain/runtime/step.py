"""The step boundary: reduce, agree in one small all-gather, then update every unit or none.

The update may go on in the background when `Engine.step` returns (docs/adr/0016): what is agreed here, and
every number of the update, is final by then.

The record that the ranks exchange carries everything they must agree on: the gradient norm (summed in rank
order, so its bits are the same everywhere), whether anything was not finite, whether anybody wants to stop,
and hashes that show whether the ranks issued the same collectives. Called by `Engine.step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.comm.group import Comm, CommError
from zerotrain.runtime.comm.model_parallel import is_divided
from zerotrain.runtime.comm.sums import sums_of_squares
from zerotrain.runtime.offload.transfer import DeviceLink
from zerotrain.runtime.offload.updater import Updater
from zerotrain.runtime.optim.loss_division import LossDivision
from zerotrain.runtime.optim.loss_scale import LossScaler
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.updating import Updating
from zerotrain.runtime.zero.clipping import clip_factor
from zerotrain.runtime.zero.core import Core
from zerotrain.runtime.zero.gradients import UnitGradients

RELAYOUT_MARK = -1.0
"""In place of a step record's sum of squares: the rank did not come for a step, but rebuilds its units."""

STOP, LATE_GRADIENTS = 1, 2
"""Flags of a step record: wants to stop; holds gradients that were not sent (see zero/reduce.py)."""

SAVE_STAGE = 4
"""Flags of a step record: factor of the stage (0 to 3) of a checkpoint that is written in the background."""

OUTSIDE_WRITES = 16
"""Flag of a step record: the rank wrote into parameters since the last step (see zero/writes.py)."""
REST = 32
"""Flags of a step record: factor of what the gradients are still to be divided by
(optim/loss_division.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one `Engine.step()` did. Equal on every rank except `seconds`."""

    step: int
    """Step boundaries so far, skipped ones included."""
    at_boundary: bool
    """False inside gradient accumulation, where nothing else here has a meaning."""
    grad_norm: float = 0.0
    """Global 2-norm of the averaged gradient before clipping, without the loss scale; under 1-bit Adam after
    its warm-up the root mean square of the ranks' own norms, as nobody has the average."""
    skipped: bool = False
    """The gradient was not finite; weights, states and schedule are unchanged."""
    loss_scale: float = 1.0
    """Factor on the loss of this step; 1 unless fp16 computes."""
    lr: float = 0.0
    """Rate of the first parameter group in this step."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """This rank's seconds by phase since the step before, saves and loads left out: forward, backward,
    reduce, optimizer (what the main thread spent on updates or waited for them), gather, wait (for
    collectives, within those); and beside them optimizer_background: what a thread spent on updates that
    were waited for since."""
    rank_seconds: tuple[float, ...] = ()
    """Seconds from the end of the step before to this one's record, per rank; saves and loads left out."""
    rank_wait_seconds: tuple[float, ...] = ()
    """The part of it spent waiting for collectives, per rank: the odd one out is the slow one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """64 bytes per rank; see the module's text."""

    sum_squares: float
    not_finite: float
    flags: float
    """Sum of `STOP`, `LATE_GRADIENTS`, `SAVE_STAGE` times the stage, `OUTSIDE_WRITES` and `REST` times the
    rest."""
    sequence: float
    unit_order: float
    step_seconds: float
    compute_seconds: float
    wait_seconds: float

    def fields(self) -> list[float]:
        """In the order of declaration."""
        return [getattr(self, name) for name in self.__slots__]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The result for the user and what only the engine needs."""

    result: StepResult
    stop: bool
    """Some rank wants to stop."""
    save_stages: tuple[int, ...] = ()
    """Every rank's stage of the checkpoint that is written in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the records of all ranks say together."""

    sum_squares: float
    overflow: bool
    stop: bool


class StepPipeline:
    """Everything between the last backward of a step and the next forward."""

    def __init__(
        self,
        core: Core,
        optimizer: ZeroOptimizer,
        *,
        comm: Comm,
        config: EngineConfig,
        clock: StepClock,
        updater: Updater | None = None,
    ) -> None:
        """`updater` None: a step returns when its update is done."""
        precision = config.precision
        offload = config.zero.offload_optimizer
        link = None
        if comm.device.type == "cuda" and offload is not None:
            link = DeviceLink(comm.device, core.ledger, pins=offload.pin_memory)
        core.updates.publish_numel = config.zero.allgather_bucket_size
        self.updating = Updating(core, optimizer, updater=updater, link=link)
        self.scaler = LossScaler(precision)
        self.division = LossDivision(precision)
        core.gradient_scale = lambda: self.scaler.scale * self.division.rest
        self._core = core
        self._optimizer = optimizer
        self._comm = comm
        self._clock = clock
        self._clip_norm = config.gradient_clipping
        self._skips_non_finite = precision.compute_dtype != "bf16" or precision.check_grad_overflow
        self._overflowed: list[str] = []
        """Units whose gradients were not finite in this step, of this rank's part."""

    def run(self, *, step: int, stop: bool, save_stage: int = 0) -> StepOutcome:
        """Do one boundary."""
        self._core.updates.settle_all()  # of a step that no forward pass followed
        lap = self._clock.take_lap()
        phases = lap.passes
        flags = STOP * stop + SAVE_STAGE * save_stage + REST * self.division.rest
        flags += OUTSIDE_WRITES * self._core.writes.found()
        rows, waited = self._settle_gradients(phases, flags)
        if any(int(row.flags) & OUTSIDE_WRITES for row in rows):
            self._core.writes.settle()
        began = perf_counter()
        loss_scale = self.scaler.scale
        verdict = self.decide(rows)
        norm = verdict.sum_squares**0.5 / self._core.gradient_scale()
        if self._optimizer.is_local:
            norm /= len(rows) ** 0.5
        overflow = verdict.overflow
        skipped = overflow and self._skips_non_finite
        lr = self._optimizer.lr
        gathering = 0.0 if skipped else self.updating.start(self.grad_scale(norm))
        self.clear()
        self.scaler.update(overflow=overflow, where=self._overflowed)
        phases["optimizer"] = perf_counter() - began - gathering + lap.fenced
        phases["gather"] = gathering + lap.published
        phases["optimizer_background"] = lap.background
        self._comm.poll_timings()
        phases["wait"] = waited + self._comm.take_wait_seconds()
        result = StepResult(
            step=step,
            at_boundary=True,
            grad_norm=norm,
            skipped=skipped,
            loss_scale=loss_scale,
            lr=lr,
            seconds=phases,
            rank_seconds=tuple(row.step_seconds for row in rows),
            rank_wait_seconds=tuple(row.wait_seconds for row in rows),
        )
        return StepOutcome(
            result=result,
            stop=verdict.stop,
            save_stages=tuple(int(row.flags) % (4 * SAVE_STAGE) // SAVE_STAGE for row in rows),
        )

    def _settle_gradients(self, phases: dict[str, float], flags: int) -> tuple[list[StepRecord], float]:
        """Reduce, and exchange records until nobody holds gradients that were not sent; the records and the
        seconds of waiting so far."""
        began = perf_counter()
        self._core.finish_backward()
        for part in self._core.gradients.values():
            part.settle()
        self._core.reducer.reduce_replicated()
        waited = 0.0
        while True:
            total = self.sum_of_squares()
            phases["reduce"] = perf_counter() - began
            # The sum is on the host, so on CUDA the stream has all the waits of this step behind it.
            self._comm.poll_timings()
            waited += self._comm.take_wait_seconds()
            seconds = self._clock.step_seconds
            rows = self.agree(
                StepRecord(
                    sum_squares=total,
                    not_finite=float(not math.isfinite(total)),
                    flags=float(flags + LATE_GRADIENTS * self._core.reducer.has_late),
                    sequence=self._comm.take_sequence(),
                    unit_order=self._core.reducer.seen_order_hash,
                    step_seconds=seconds,
                    compute_seconds=seconds - waited,
                    wait_seconds=waited,
                )
            )
            if not any(int(row.flags) & LATE_GRADIENTS for row in rows):
                return rows, waited
            self._core.reducer.reduce_late()

    @torch.no_grad()
    def sum_of_squares(self) -> float:
        """Of the reduced gradients that this rank owns, or of its own ones where nothing reduces them, in
        float64."""
        gradients = self._core.gradients
        # In layout order at every stage, so that every stage computes the same bits.
        counted = [(name, flat) for name, part in gradients.items() for flat in self._counted(part)]
        squares = dict.fromkeys(gradients, 0.0)
        for (name, _), value in zip(counted, sums_of_squares([flat for _, flat in counted]), strict=True):
            squares[name] += value
        self._overflowed = [name for name, value in squares.items() if not math.isfinite(value)]
        return sum(squares.values())

    def _counted(self, part: UnitGradients) -> list[torch.Tensor]:
        """What this rank adds of a unit, without what another rank of the model-parallel group adds."""
        if self._optimizer.is_local:
            return [part.accumulator]
        own, parallel = part.own_part, self._comm.model_parallel
        if parallel is None or parallel.rank == 0:
            return [own]
        unit, divided = part.unit, []
        for segment, parameter in zip(unit.layout.segments, unit.parameters, strict=True):
            start, stop = max(unit.start, segment.start), min(unit.stop, segment.stop)
            if start < stop and is_divided(parameter):
                divided.append(own[start - unit.start : stop - unit.start])
        return divided

    def decide(self, rows: list[StepRecord]) -> Verdict:
        """The ranks' common verdict; the ranks of a model-parallel group have one, too."""
        total = sum(row.sum_squares for row in rows)
        overflow = any(row.not_finite for row in rows)
        stop = any(int(row.flags) & STOP for row in rows)
        if (parallel := self._comm.model_parallel) is not None:
            parts = parallel.combine([total, float(overflow), float(stop)], self._comm.device)
            total = sum(part[0] for part in parts)
            overflow, stop = any(part[1] for part in parts), any(part[2] for part in parts)
        return Verdict(sum_squares=total, overflow=overflow, stop=stop)

    def agree(self, record: StepRecord) -> list[StepRecord]:
        """Exchange records. Raises CommError when the ranks did not issue the same collectives."""
        names = StepRecord.__slots__
        raw = self._comm.gather_record(record.fields())
        rows = [StepRecord(**dict(zip(names, row, strict=True))) for row in raw]
        changed = [rank for rank, row in enumerate(rows) if row.sum_squares == RELAYOUT_MARK]
        if changed:
            raise CommError(
                f"ranks {changed} changed requires_grad of parameters since the last step and rank "
                f"{self._comm.rank} did not; freeze and unfreeze the same parameters on every rank"
            )
        odd = [rank for rank, row in enumerate(rows) if row.sequence != rows[0].sequence]
        if odd:
            raise CommError(
                f"ranks {odd} issued other collectives than rank 0 since the last step; "
                "the model must call the same modules in the same order on every rank (where ranks visit "
                "different experts at stage 3, name the module that holds them in "
                "zero_optimization.leaf_module)"
            )
        if len({int(row.flags) // REST for row in rows}) > 1:
            raise CommError(
                "some ranks began the step with a bfloat16 loss and others with one of another dtype; return "
                "a loss of one dtype on every rank, for example loss.float()"
            )
        if len({row.unit_order for row in rows}) == 1:
            self._core.reducer.adopt_seen_order()
        return rows

    def grad_scale(self, norm: float) -> float:
        """Factor on the gradients that takes the loss scale and what is left of the losses' division out and
        bounds their global norm, which is known where they are reduced."""
        if self._clip_norm <= 0.0 or self._optimizer.is_local:
            return 1.0 / self._core.gradient_scale()
        return clip_factor(self._clip_norm, norm) / self._core.gradient_scale()

    def drop_any(self) -> None:
        """`drop` where there is something; an update in the background is not waited for."""
        parts = (part for part in self._core.gradients.values() if part.unit not in self._core.updates)
        if self._core.has_gradients or any(part.is_touched for part in parts):
            self.drop()

    def drop(self) -> None:
        """Forget what backward passes since the last step computed, also one that raised."""
        try:
            self._core.finish_backward()
        finally:
            self.clear(everything=True)

    def clear(self, *, everything: bool = False) -> None:
        """Forget the gradients of this step; `everything`: also those that were not reduced."""
        self._core.has_gradients = self._core.is_torn = False
        self.division.rest = 1
        self._core.passes.end_step()
        for gradients in self._core.gradients.values():
            if gradients.unit not in self._core.updates:  # those are read, and cleared when they are settled
                gradients.clear(everything=everything)
