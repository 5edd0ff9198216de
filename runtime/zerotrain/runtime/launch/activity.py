"""Timing of a rank's steps by the launcher's monotonic clock: the rank table feeds it, the operator reads it.

The operator compares the age of a step with the usual duration of steps in this attempt. Both are measured
here, beside the rank: neither the operator's polling interval nor an adjusted clock can make a step look old.
"""

from __future__ import annotations

from collections import deque
from math import ceil

from zerotrain.contract.progress import Motion, Phase, Progress

KEPT_STEPS = 512
"""Largest number of steps in the percentile."""

_TRAINING = (Phase.FIRST_STEP, Phase.STEP)


class MotionTracker:
    """Motion of one rank in one attempt. Times are monotonic seconds; the caller locks."""

    def __init__(self, now: float) -> None:
        self._moved_at = self._last_message_at = now
        self._ended_at: float | None = None
        self._phase, self._step = Phase.INIT, 0
        self._steps: deque[float] = deque(maxlen=KEPT_STEPS)
        self._first_step: float | None = None
        self._longest_step: float | None = None
        self._longest_checkpoint: float | None = None
        self._seen = 0
        self._evaluated = 0
        self._before: tuple[Phase, float] | None = None
        """Phase and seconds of the part of the step before a pause or a checkpoint in the middle of it."""

    def message_arrived(self, now: float) -> None:
        """Record that a message of the rank arrived."""
        self._last_message_at = now

    def ended(self, now: float) -> None:
        """Record that the rank's process is gone: no further message is due."""
        self._ended_at = now

    def progress_arrived(self, progress: Progress, now: float) -> None:
        """Record a progress record of the rank; a repeated one is a heartbeat."""
        self._last_message_at = now
        evaluates = progress.evaluated != self._evaluated
        self._evaluated = progress.evaluated
        if (progress.phase, progress.step) == (self._phase, self._step):
            if evaluates and self._phase not in _TRAINING:
                # A pause is as long as its longest part: a rank that stops within it is noticed.
                self._learn(now - self._moved_at, 0)
                self._moved_at = now
            return
        seconds, steps = now - self._moved_at, progress.step - self._step
        if self._phase in _TRAINING and progress.phase is Phase.CHECKPOINT and steps == 0:
            began_in, earlier = self._before or (self._phase, 0.0)
            self._before = began_in, earlier + seconds
        else:
            self._learn(seconds, steps)
        if steps:
            self._before = None
        self._phase, self._step, self._moved_at = progress.phase, progress.step, now

    def motion(self, now: float) -> Motion:
        return Motion(
            idle_seconds=round(now - self._moved_at, 1),
            silent_seconds=round(now - self._last_message_at, 1) if self._ended_at is None else 0.0,
            ended_seconds=None if self._ended_at is None else round(now - self._ended_at, 1),
            steps_seen=self._seen,
            step_p99_seconds=_percentile(self._steps, 0.99),
            longest_step_seconds=self._longest_step,
            first_step_seconds=self._first_step,
            longest_checkpoint_seconds=self._longest_checkpoint,
        )

    def _learn(self, seconds: float, steps: int) -> None:
        """Learn the duration of the rank's last phase or steps, `seconds`; records of fast steps may have
        been dropped, and a program may report only every so many steps."""
        phase, before = self._before or (self._phase, 0.0)
        if self._phase is Phase.CHECKPOINT:
            self._longest_checkpoint = max(self._longest_checkpoint or 0.0, seconds)
            # The record of the phase in between was dropped, so that phase was short.
            seconds = 0.0
        if steps <= 0:
            return
        seconds += before
        if phase is Phase.FIRST_STEP:
            # Not divided by the steps: for compilation and first step together only an upper bound is known.
            self._first_step = max(self._first_step or 0.0, seconds)
        elif phase is Phase.STEP:
            self._steps.append(seconds / steps)
            self._longest_step = max(self._longest_step or 0.0, seconds)
            self._seen += steps


def _percentile(values: deque[float], share: float) -> float | None:
    if not values:
        return None
    return sorted(values)[ceil(share * len(values)) - 1]
