"""Which rank holds up all others: rank 0 works it out from the numbers that the ranks exchange at every step.

A step's own time is what is left without the waits for collectives; in synchronous training the rank with
the longest one sets the pace. Medians over the last steps, so that one slow step, such as that in which a
rank wrote a checkpoint, accuses nobody. On CUDA, where the host runs ahead, the waits are those of the
stream.
"""

from __future__ import annotations

import torch

from zerotrain.contract.progress import Straggler
from zerotrain.runtime.step import StepResult

WINDOW = 32
"""Steps that the medians are of; before so many there is no word on anybody."""

EVERY = 8
"""Steps between two looks: at thousands of ranks one costs milliseconds."""


class OwnTimes:
    """The last steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._seconds = torch.zeros(WINDOW, world_size, dtype=torch.float32)
        self._steps = 0
        self.slowest: Straggler | None = None
        """As of the last look."""

    def add(self, result: StepResult) -> None:
        """Take in one step."""
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
