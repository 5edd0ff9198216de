"""Conditions on a changed job beside its memory, for the search for the nearest that fits.

A proposal that the operator would reject is useless. The batch follows the number of ranks by the rules
of the resolver. A reader of the caller decides in the end: it makes the change and reads the result as it
reads every job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zerotrain.contract.config import EngineConfig
from zerotrain.contract.config.batch import ACCUMULATION, MICRO, TRAIN, resolve_batch
from zerotrain.contract.config.scaling import GlobalBatch
from zerotrain.contract.config.schema import BatchConfig

from .demand import Workload

Edits: TypeAlias = Mapping[str, Any]
"""Keys of the configuration by canonical path, with the values that a user would write."""

Reader: TypeAlias = Callable[[Edits, int], Workload | None]
"""Reader of the job with changed keys and a number of workers; None if it would be rejected.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Conditions of one job."""

    train_batch_size: int | None = None
    """Samples of a step that the file sets; None if it does not."""
    micro_batch_size: int | None = None
    """Samples of a forward pass on one rank that the file sets; None if it does not."""
    gradient_accumulation_steps: int | None = None
    """Forward passes of a step that the file sets; None if it does not."""
    base_ranks: int | None = None
    """Ranks whose global batch an elastic job keeps; None = resolve it for each number of ranks.
    """
    has_volume: bool = True
    """Whether workers have a volume for spilled state."""
    most_workers: int = sys.maxsize
    """Largest number of workers to propose."""
    reader: Reader | None = None
    """Reader that confirms a proposal; None = no confirmation."""

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> Terms:
        """Return the conditions with the batch sizes in the file behind `config`.

        `others` are the remaining fields.
        """
        given = {line.path: line.value for line in config.report if line.origin in ("file", "auto")}
        return cls(
            train_batch_size=given.get(TRAIN),
            micro_batch_size=given.get(MICRO),
            gradient_accumulation_steps=given.get(ACCUMULATION),
            **others,
        )

    def batch(self, world_size: int, edits: Edits) -> BatchConfig:
        """Return the batch of that many ranks after the edits. Raises ConfigError if it does not divide."""
        micro = edits.get(MICRO, self.micro_batch_size)
        resolved = resolve_batch(
            train=edits.get(TRAIN, self.train_batch_size),
            micro=micro,
            accumulation=edits.get(ACCUMULATION, self.gradient_accumulation_steps),
            world_size=self.base_ranks or world_size,
        )
        if self.base_ranks is None:
            return resolved
        kept = GlobalBatch(
            train_batch_size=resolved.train_batch_size,
            micro_batch_size=resolved.micro_batch_size,
            is_micro_given=micro is not None,
        )
        return kept.at(world_size)
