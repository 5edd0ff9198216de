"""The step boundary: reduce, agree in one small all-gather, then update every unit or none.

The update may go on in the background when `Engine.step` returns (docs/adr/0016). What is agreed here, and
every number of the update, is final by then.

The ranks agree by the record of `step_record.py`. Called by `Engine.step`.

[Note: the host behind the device] On a GPU the host need not know the norm to start an update. The ranks'
sums of squares are then gathered by the devices, beside the record, which the hosts exchange. Kernels compute
the factor from them, and write nothing if a gradient was not finite and such steps are skipped. The host
counts the step, and advances the schedule. It reads the sums at the next step, before anything else, or when
somebody asks for the norm, the loss scale or whether the step was skipped. If it was, ages, counts and rates
are taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from time import perf_counter

import torch

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.comm.model_parallel import is_divided
from zerotrain.runtime.comm.sums import squares_on_device, sums_of_squares
from zerotrain.runtime.late_numbers import DeviceSquares, Late, LateStep
from zerotrain.runtime.offload.transfer import DeviceLink
from zerotrain.runtime.offload.updater import Updater
from zerotrain.runtime.optim.device_scale import device_scale
from zerotrain.runtime.optim.loss_scale import LossDivision, LossScaler
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.step_executor import StepExecutor
from zerotrain.runtime.optim.update import UpdateRule
from zerotrain.runtime.step_record import (
    LATE_GRADIENTS,
    ON_DEVICE,
    OUTSIDE_WRITES,
    REST,
    SAVE_STAGE,
    STOP,
    StepRecord,
    exchange_records,
)
from zerotrain.runtime.zero.clipping import clip_factor
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.sharded_model import ShardedModel


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one `Engine.step()`. Equal on every rank except `seconds`."""

    step: int
    """Step boundaries so far, skipped ones included."""
    at_boundary: bool
    """Whether a step ended; False inside gradient accumulation, where the other fields have no meaning."""
    grad_norm: Late[float] = Late(0.0)  # noqa: RUF009  # a descriptor, one for all results
    """Global 2-norm of the averaged gradient before clipping, without the loss scale. Under 1-bit Adam after
    its warm-up the root mean square of the ranks' own norms, as no rank has the average. On a GPU, reading it
    may wait until the device has computed it."""
    skipped: Late[bool] = Late(False)  # noqa: RUF009
    """Whether the gradient was not finite; weights, states and schedule are unchanged then. Reading it may
    wait as well."""
    loss_scale: float = 1.0
    """Factor on the loss of this step; 1 unless the model computes in fp16."""
    lr: float = 0.0
    """Learning rate of the first parameter group in this step."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of this rank by phase since the previous step, without saves and loads: forward, backward,
    reduce, optimizer (time that the main thread spent on updates or waited for them), gather, wait (for
    collectives, within those); and, apart from them, optimizer_background: time that a thread spent on
    updates that were waited for since."""
    rank_seconds: tuple[float, ...] = ()
    """Seconds from the end of the previous step to this one's record, per rank; without saves and loads."""
    rank_wait_seconds: tuple[float, ...] = ()
    """Part of `rank_seconds` spent waiting for collectives, per rank: a rank that differs from the others is
    the straggler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Result for the user, and values for the engine alone."""

    result: StepResult
    late: LateStep | None = None
    """The step, if the host does not know yet whether it was skipped."""
    stop: bool
    """Whether a rank wants to stop."""
    save_stages: tuple[int, ...] = ()
    """Stage, on every rank, of the checkpoint that is written in the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDecision:
    """Common result of the records of all ranks."""

    sum_squares: float
    overflow: bool
    stop: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """The update of a step, as far as it is known when it has started."""

    norm: float | Callable[[], float]
    skipped: bool | Callable[[], bool]
    gathering: float
    """Seconds of bringing replicas up to date."""
    late: LateStep | None = None


class StepPipeline:
    """Work between the last backward pass of a step and the next forward pass."""

    def __init__(
        self,
        core: ShardedModel,
        optimizer: ZeroOptimizer,
        *,
        comm: Comm,
        config: EngineConfig,
        clock: StepClock,
        updater: Updater | None = None,
    ) -> None:
        """`updater` None means that a step returns when its update is done."""
        precision = config.precision
        offload = config.zero.offload_optimizer
        link = None
        if comm.device.type == "cuda" and offload is not None:
            link = DeviceLink(comm.device, core.ledger, pins=offload.pin_memory)
        self.executor = StepExecutor(core, optimizer, updater=updater, link=link)
        self._scaler = LossScaler(precision)
        self.division = LossDivision(precision)
        self._core = core
        self._optimizer = optimizer
        self._comm = comm
        self._clock = clock
        self._clip_norm = config.gradient_clipping
        self._skips_non_finite = precision.compute_dtype != "bf16" or precision.check_grad_overflow
        is_offloaded = offload is not None or config.zero.offload_param is not None
        self._may_run_ahead = not is_offloaded and comm.model_parallel is None
        """Whether an update may start before the host knows the norm; see docs/adr/0073."""
        self._late: LateStep | None = None
        """The last step, if the host may not know what became of it."""
        self._overflowed: list[str] = []
        """Units whose gradients, in this rank's part, were not finite in this step."""

    @property
    def scaler(self) -> LossScaler:
        """The loss scale, as the last step left it. Only a dynamic one depends on what the device found."""
        if self._scaler.is_dynamic:
            self.settle()
        return self._scaler

    @property
    def gradient_scale(self) -> float:
        """Factor of the loss scaling in the accumulated gradients."""
        return self.scaler.scale * self.division.rest

    def run(self, *, step: int, stop: bool, save_stage: int = 0) -> StepOutcome:
        """Carry out one step boundary."""
        self._core.updates.settle_all()  # of a step that no forward pass followed
        lap = self._clock.take_lap()
        phases = lap.passes
        flags = STOP * stop + SAVE_STAGE * save_stage + REST * self.division.rest
        flags += OUTSIDE_WRITES * self._core.writes.found()
        rows, squares, waited = self._settle_gradients(phases, flags)
        if any(int(row.flags) & OUTSIDE_WRITES for row in rows):
            self._core.writes.settle()
        began = perf_counter()
        loss_scale, lr = self.scaler.scale, self._optimizer.lr
        decision = self.decide(rows)
        update = self._update(decision, len(rows)) if squares is None else self._update_ahead(squares)
        gathering = update.gathering
        phases["optimizer"] = perf_counter() - began - gathering + lap.fenced
        phases["gather"] = gathering + lap.published
        phases["optimizer_background"] = lap.background
        self._comm.poll_timings()
        phases["wait"] = waited + self._comm.take_wait_seconds()
        result = StepResult(
            step=step,
            at_boundary=True,
            grad_norm=update.norm,
            skipped=update.skipped,
            loss_scale=loss_scale,
            lr=lr,
            seconds=phases,
            rank_seconds=tuple(row.step_seconds for row in rows),
            rank_wait_seconds=tuple(row.wait_seconds for row in rows),
        )
        return StepOutcome(
            result=result,
            late=update.late,
            stop=decision.stop,
            save_stages=tuple(int(row.flags) % (4 * SAVE_STAGE) // SAVE_STAGE for row in rows),
        )

    def _update(self, decision: StepDecision, num_ranks: int) -> _Update:
        """Update every unit or none, as the host has decided."""
        norm = decision.sum_squares**0.5 / self.gradient_scale
        if self._optimizer.is_local:
            norm /= num_ranks**0.5
        skipped = decision.overflow and self._skips_non_finite
        gathering = 0.0 if skipped else self.executor.start(self.grad_scale(norm))
        self._end_update(gathering)
        self.scaler.update(overflow=decision.overflow, where=self._overflowed)
        return _Update(norm=norm, skipped=skipped, gathering=gathering)

    def _update_ahead(self, squares: DeviceSquares) -> _Update:
        """Start the update of every unit; see [Note: the host behind the device]."""
        gradient_scale = self.gradient_scale
        scale = device_scale(
            squares.by_rank,
            gradient_scale=gradient_scale,
            max_norm=self._clip_norm,
            skips_non_finite=self._skips_non_finite,
        )
        gathering = self.executor.start(scale)
        self._end_update(gathering)
        late = self._late = LateStep(
            squares,
            gradient_scale=gradient_scale,
            may_skip=self._skips_non_finite,
            end=self._end_late_step,
        )
        skipped: bool | Callable[[], bool] = late.is_skipped if late.may_skip else False
        return _Update(norm=late.norm, skipped=skipped, gathering=gathering, late=late)

    def _end_update(self, gathering: float) -> None:
        self.clear()
        self._clock.count_published(gathering)

    def _end_late_step(self, bad_units: list[bool], overflow: bool) -> None:
        """Follow what the device found in the last step's gradients."""
        if overflow and self._skips_non_finite:
            self._optimizer.withdraw_step()
        self._overflowed = [*compress(self._core.gradients, bad_units)]
        self._scaler.update(overflow=overflow, where=self._overflowed)

    def settle(self) -> None:
        """Read what the device found in the last step, if nobody has. Raises the errors of
        `LateStep.settle`."""
        if self._late is not None:
            self._late.settle()
            self._late = None

    def _settle_gradients(
        self, phases: dict[str, float], flags: int
    ) -> tuple[list[StepRecord], DeviceSquares | None, float]:
        """Reduce, and exchange records until no rank holds unsent gradients; return the records, the sums of
        squares where they stay on the device, and the seconds of waiting so far."""
        began = perf_counter()
        self._core.finish_backward()
        for part in self._core.gradients.values():
            part.settle()
        self._core.reducer.reduce_replicated()
        waited = 0.0
        while True:
            squares = self._squares_on_device()
            total = self.sum_of_squares() if squares is None else 0.0
            phases["reduce"] = perf_counter() - began
            # If the sum is on the host, a stream of CUDA has passed all the waits of this step. Else some of
            # them are counted in the next one.
            self._comm.poll_timings()
            waited += self._comm.take_wait_seconds()
            seconds = self._clock.step_seconds
            rows = self.agree(
                StepRecord(
                    sum_squares=total,
                    not_finite=float(not math.isfinite(total)),
                    flags=float(
                        flags
                        + LATE_GRADIENTS * self._core.reducer.has_late
                        + ON_DEVICE * (squares is not None)
                    ),
                    sequence=self._comm.take_sequence(),
                    unit_order=self._core.reducer.seen_order_hash,
                    step_seconds=seconds,
                    compute_seconds=seconds - waited,
                    wait_seconds=waited,
                )
            )
            if any(int(row.flags) & LATE_GRADIENTS for row in rows):
                self._core.reducer.reduce_late()
            elif len({int(row.flags) & ON_DEVICE for row in rows}) > 1:
                self._may_run_ahead = False  # another rank's GPU may not use our kernels
            else:
                return rows, None if squares is None else DeviceSquares(squares, self._comm), waited

    @torch.no_grad()
    def _squares_on_device(self) -> torch.Tensor | None:
        """Return the sums of squares of this rank's parts of the units if the update can start without them
        on the host, else None."""
        rule = self._optimizer.rule
        if not self._may_run_ahead or not (isinstance(rule, UpdateRule) and rule.takes_device_scale):
            return None
        return squares_on_device([part.own_part for part in self._core.gradients.values()])

    @torch.no_grad()
    def sum_of_squares(self) -> float:
        """Return the sum, in float64, of the squares of the reduced gradients that this rank owns, or of its
        own gradients where nothing reduces them."""
        gradients = self._core.gradients
        # In layout order at every stage, so that every stage computes the same bits.
        squares = {**dict.fromkeys(gradients, 0.0), **self._known_squares()}
        counted = [
            (name, flat)
            for name, part in gradients.items()
            if squares[name] == 0.0
            for flat in self._counted(part)
        ]
        for (name, _), value in zip(counted, sums_of_squares([flat for _, flat in counted]), strict=True):
            squares[name] += value
        self._overflowed = [name for name, value in squares.items() if not math.isfinite(value)]
        return sum(squares.values())

    def _known_squares(self) -> dict[str, float]:
        """Return finite sums of squares that were computed before gradients left for the host, by unit."""
        parallel = self._comm.model_parallel
        if parallel is not None and parallel.rank > 0:
            return {}  # it counts parts of units
        known = {name: part.known_squares() for name, part in self._core.gradients.items()}
        tiles = [tile for found in known.values() for tile in found]
        values = iter(torch.stack(tiles).tolist() if tiles else ())
        sums = {name: sum(next(values) for _ in found) for name, found in known.items()}
        return {name: value for name, value in sums.items() if math.isfinite(value)}

    def _counted(self, part: UnitGradients) -> list[torch.Tensor]:
        """Return the gradients of a unit that this rank counts: those that no other rank of the
        model-parallel group counts."""
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

    def decide(self, rows: list[StepRecord]) -> StepDecision:
        """Return the ranks' common decision, which the ranks of a model-parallel group share, too."""
        total = sum(row.sum_squares for row in rows)
        overflow = any(row.not_finite for row in rows)
        stop = any(int(row.flags) & STOP for row in rows)
        if (parallel := self._comm.model_parallel) is not None:
            parts = parallel.combine([total, float(overflow), float(stop)], self._comm.device)
            total = sum(part[0] for part in parts)
            overflow, stop = any(part[1] for part in parts), any(part[2] for part in parts)
        return StepDecision(sum_squares=total, overflow=overflow, stop=stop)

    def agree(self, record: StepRecord) -> list[StepRecord]:
        """Exchange records; see `exchange_records`."""
        rows = exchange_records(record, self._comm)
        if len({row.unit_order for row in rows}) == 1:
            self._core.reducer.adopt_seen_order()
        return rows

    def grad_scale(self, norm: float) -> float:
        """Return the factor on the gradients that removes the loss scale and the rest of the losses'
        division, and that bounds their global norm. Without a bound where nothing reduces the gradients: the
        norm is not known then."""
        if self._clip_norm <= 0.0 or self._optimizer.is_local:
            return 1.0 / self.gradient_scale
        return clip_factor(self._clip_norm, norm) / self.gradient_scale

    def drop_any(self) -> None:
        """Call `drop` where there are gradients; an update in the background is not waited for."""
        parts = (part for part in self._core.gradients.values() if part.unit not in self._core.updates)
        if self._core.has_gradients or any(part.is_touched for part in parts):
            self.drop()

    def drop(self) -> None:
        """Drop what backward passes since the last step computed, also one that raised."""
        try:
            self._core.finish_backward()
        finally:
            self.clear(everything=True)

    def clear(self, *, everything: bool = False) -> None:
        """Drop the gradients of this step; `everything`: also those that were not reduced."""
        self._core.has_gradients = self._core.is_torn = False
        self.division.rest = 1
        self._core.passes.end_step()
        for gradients in self._core.gradients.values():
            if gradients.unit not in self._core.updates:  # those are still read; settling them clears them
                gradients.clear(everything=everything)
