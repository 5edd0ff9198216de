"""Detection of the straggler: rank 0 finds it from the numbers that the ranks exchange at every step.

A rank's own time is the step without the waits for collectives; in synchronous training the rank with the
longest own time sets the pace. Medians over the last steps are compared, so that one slow step, such as that
in which a rank wrote a checkpoint, blames no rank. On CUDA, where the host runs ahead, the waits are those of
the stream.
"""

from __future__ import annotations

import torch

from zerotrain.contract.progress import Straggler
from zerotrain.runtime.step import StepResult

WINDOW = 32
"""Steps of the medians; no straggler is named before so many steps."""

EVERY = 8
"""Steps between two evaluations: at thousands of ranks one costs milliseconds."""


class OwnTimes:
    """Own times of all ranks in the last steps."""

    def __init__(self, world_size: int) -> None:
        self._seconds = torch.zeros(WINDOW, world_size, dtype=torch.float32)
        self._steps = 0
        self.slowest: Straggler | None = None
        """Result of the last evaluation."""

    def add(self, result: StepResult) -> None:
        """Add one step."""
        if len(result.rank_seconds) != self._seconds.shape[1] or self._seconds.shape[1] < 2:
            return
        own = torch.tensor(result.rank_seconds) - torch.tensor(result.rank_wait_seconds)
        self._seconds[self._steps % WINDOW] = own
        self._steps += 1
        if self._steps >= WINDOW and self._steps % EVERY == 0:
            self.slowest = self._look()

    def _look(self) -> Straggler:
        medians = self._seconds.median(dim=0).values
        rank = int(medians.argmax())
        return Straggler(
            rank=rank,
            own_seconds=round(float(medians[rank]), 4),
            median_seconds=round(float(medians.median()), 4),
        )
