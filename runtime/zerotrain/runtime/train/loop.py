"""The training loop of one rank. Every decision in it is the same on all ranks, because it rests on numbers
that all ranks have: the step, the global loss, the agreed stop, rank 0's clock."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from zerotrain.contract.exit_codes import ExitCode
from zerotrain.runtime.comm.streams import HostCopy
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.train import digest
from zerotrain.runtime.train.checkpointing import Checkpoints, is_due
from zerotrain.runtime.train.exits import Diverged, StoppedWithoutCheckpoint
from zerotrain.runtime.train.report import Reporter, StepReport
from zerotrain.runtime.train.session import Session
from zerotrain.runtime.train.stopping import StopRequest

MAX_NONFINITE_STEPS = 5
"""Number of consecutive losses that are NaN or infinite after which the weights count as lost (a single one
may come from a bad batch), and of consecutive updates skipped for their gradient after which training counts
as stuck."""


@dataclass(kw_only=True)
class TrainingLoop:
    """Steps until the job's end or an agreed stop."""

    session: Session
    checkpoints: Checkpoints
    reporter: Reporter
    stop: StopRequest
    _nonfinite_steps: int = 0
    _skipped_steps: int = 0
    has_stepped: bool = False
    """Whether this process completed a whole step."""

    def run(self) -> ExitCode:
        """Train; return DONE after the last step or YIELDED on request. Raises Diverged, and errors of data
        and disk."""
        engine, total = self.session.engine, self.session.settings.spec.steps
        engine.train()
        self.stop.set_callback(engine.request_stop)
        while engine.global_steps < total:
            is_time_up = self._one_step()
            if engine.stop_agreed and engine.global_steps < total:
                return self._yield()
            if self._may_save() and is_due(
                self.checkpoints.policy, step=engine.global_steps, is_time_up=is_time_up
            ):
                self.checkpoints.save(wait=False)
        self._check_last_loss()
        self.checkpoints.save(wait=True)
        return ExitCode.DONE

    def _one_step(self) -> bool:
        """Train one step; return whether rank 0 says that it is time for a checkpoint."""
        engine = self.session.engine
        began = time.perf_counter()
        losses, data_seconds, result = self._micro_batches()
        looks = digest.is_due(engine, is_first=not self.has_stepped)
        self.has_stepped = True
        rows = engine.comm.gather_record(
            [
                float(torch.stack([loss.read() for loss in losses]).double().mean()),
                float(self.checkpoints.is_time_up),
                digest.digest(engine) if looks else 0.0,
            ]
        )
        loss = sum(row[0] for row in rows) / len(rows)
        self.reporter.step(
            StepReport(
                result=result,
                loss=loss,
                seconds=time.perf_counter() - began,
                data_seconds=data_seconds,
                tokens=self.session.tokens_per_step,
                samples=engine.config.batch.micro_batch_size * len(losses),
                skipped=int(result.skipped),
                agrees=rows[engine.rank][2] == rows[0][2] if looks else None,
            ),
            engine=engine,
        )
        self._watch_divergence(loss, is_skipped=result.skipped)
        return bool(rows[0][1])

    def _micro_batches(self) -> tuple[list[HostCopy], float, StepResult]:
        engine = self.session.engine
        losses: list[HostCopy] = []
        data_seconds = 0.0
        batches = self.session.loader.step_batches()
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            data_seconds += time.perf_counter() - began
            if batch is None:
                break
            loss = self.session.model.loss(engine, _sent(batch, engine.device))
            engine.backward(loss)
            losses.append(HostCopy(loss))  # before the update, which the host need not wait for
            result = engine.step()
        return losses, data_seconds, result

    def _watch_divergence(self, loss: float, *, is_skipped: bool) -> None:
        self._nonfinite_steps = 0 if math.isfinite(loss) else self._nonfinite_steps + 1
        if self._nonfinite_steps >= MAX_NONFINITE_STEPS:
            raise Diverged(
                f"the loss was not finite for {self._nonfinite_steps} steps up to step "
                f"{self.session.engine.global_steps}; "
                "lower the learning rate, or start from an earlier checkpoint"
            )
        self._skipped_steps = self._skipped_steps + 1 if is_skipped else 0
        if self._skipped_steps >= MAX_NONFINITE_STEPS:
            raise Diverged(
                f"the gradient was not finite for {self._skipped_steps} steps up to step "
                f"{self.session.engine.global_steps}, so the weights were not updated; "
                "lower the learning rate, or look at the model's loss"
            )

    def _check_last_loss(self) -> None:
        if not self._may_save():
            raise Diverged(
                f"the loss was not finite at the end, step {self.session.engine.global_steps}; "
                "nothing is saved of it; lower the learning rate, or start from an earlier checkpoint"
            )

    def _may_save(self) -> bool:
        # A checkpoint of lost weights would displace a good one.
        return self._nonfinite_steps == 0

    def _yield(self) -> ExitCode:
        engine, step = self.session.engine, self.session.engine.global_steps
        engine.wait_for_checkpoint()
        if not self.checkpoints.enabled or not self.checkpoints.policy.on_termination:
            if engine.last_save is None or engine.last_save.step != step:
                raise StoppedWithoutCheckpoint(
                    f"all ranks stopped after step {step} on request without saving; "
                    "the job has no checkpoint folder, or its policy does not save then"
                )
        elif not self._may_save():
            raise StoppedWithoutCheckpoint(
                f"all ranks stopped after step {step} on request without saving: the loss was not finite; "
                "the next attempt goes on from the last checkpoint"
            )
        else:
            self.checkpoints.save(wait=True)
        self.reporter.say(f"stopped after step {step} on request; the next attempt goes on from there")
        return ExitCode.YIELDED


def _sent(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the batch on the device where the model computes. On CUDA the host waits neither for the copy
    nor for earlier work of the GPU."""
    if device.type != "cuda":
        return batch
    return batch.pin_memory().to(device, non_blocking=True)
