"""The same optimizer step on another number of ranks, for the operator when it resizes a job.

The global batch belongs to the training, so it keeps its size for the job's own number of ranks; accumulation
changes with the number of ranks. A rank's memory was planned for the micro batch: one that the file sets is
kept, one that follows from the other sizes may become smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from .auto import AutoValues
from .batch import ACCUMULATION, MICRO, TRAIN
from .errors import ConfigError
from .reader import load
from .resolve import resolve
from .schema import BatchConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """The batch sizes that a resize must preserve."""

    train_batch_size: int
    """Samples of one optimizer step over all ranks."""

    micro_batch_size: int
    """Samples of one forward pass on one rank, at the job's own size."""

    is_micro_given: bool
    """Whether the file sets the micro batch, so that no other may be used."""

    def at(self, world_size: int) -> BatchConfig:
        """Return the three sizes on `world_size` ranks. Raises ConfigError with the numbers that divide."""
        if not self.fits(world_size):
            each = f"{MICRO} {self.micro_batch_size} x " if self.is_micro_given else ""
            divisor = world_size * (self.micro_batch_size if self.is_micro_given else 1)
            raise ConfigError(
                TRAIN,
                f"must be a multiple of {each}{world_size} ranks = {divisor}: the global batch stays, and "
                f"{ACCUMULATION} is what changes with the number of ranks",
                self.train_batch_size,
                f"Numbers of ranks that divide it are {_listed(self._ranks())}.",
            )
        per_rank, micro = self.train_batch_size // world_size, self.micro_batch_size
        if not self.is_micro_given:
            micro = _largest_divisor(per_rank, micro)
        return BatchConfig(
            train_batch_size=self.train_batch_size,
            micro_batch_size=micro,
            gradient_accumulation_steps=per_rank // micro,
        )

    def fits(self, world_size: int) -> bool:
        """Return whether `at` has a result for this number of ranks."""
        return self._shares % world_size == 0

    def workers(self, *, ranks_per_worker: int, lowest: int, highest: int) -> tuple[int, ...]:
        """Return the numbers of workers in this range that keep the global batch, ascending."""
        return tuple(
            workers for workers in range(lowest, highest + 1) if self.fits(workers * ranks_per_worker)
        )

    @property
    def _shares(self) -> int:
        """Number of parts that ranks and accumulation steps divide between them."""
        return (
            self.train_batch_size // self.micro_batch_size if self.is_micro_given else self.train_batch_size
        )

    def _ranks(self) -> list[int]:
        """Return all numbers of ranks that fit, found in pairs up to the square root."""
        shares = self._shares
        small = [number for number in range(1, min(isqrt(shares), 100_000) + 1) if shares % number == 0]
        return sorted({*small, *(shares // number for number in small)})


def global_batch(
    config: Mapping[str, Any], *, world_size: int, auto: AutoValues | None = None
) -> GlobalBatch:
    """Return the global batch of `config` for its own number of ranks. Raises ConfigError."""
    resolved = resolve(load(config), world_size=world_size, auto=auto)
    micro_origin = next(item.origin for item in resolved.report if item.path == MICRO)
    return GlobalBatch(
        train_batch_size=resolved.batch.train_batch_size,
        micro_batch_size=resolved.batch.micro_batch_size,
        is_micro_given=micro_origin == "file",
    )


def with_batch(config: Mapping[str, Any], batch: BatchConfig) -> dict[str, Any]:
    """Return a copy of `config` that sets all three sizes, so that every reader uses the same ones."""
    return {
        **config,
        TRAIN: batch.train_batch_size,
        MICRO: batch.micro_batch_size,
        ACCUMULATION: batch.gradient_accumulation_steps,
    }


def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that does not exceed `limit`."""
    return next(divisor for divisor in range(min(limit, number), 0, -1) if number % divisor == 0)


def _listed(numbers: list[int]) -> str:
    """Return a text with at most twelve of the numbers, since more do not help."""
    shown = ", ".join(str(number) for number in numbers[:12])
    return f"{shown}, ..." if len(numbers) > 12 else shown
