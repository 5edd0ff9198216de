"""What a changed job must keep to beside its memory: asked by the search for the nearest that fits.

A proposal that whoever runs the job would refuse is none. The batch follows the number of ranks by the rules
of the resolver, and the last word has a reader of the caller's, who makes the change and reads the result as
he reads every job.
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
"""The job with these keys changed and so many workers; None where it would be refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Of one job."""

    train_batch_size: int | None = None
    """Samples of a step as the file says it; None = it does not."""
    micro_batch_size: int | None = None
    """Samples of a forward pass on one rank, likewise."""
    gradient_accumulation_steps: int | None = None
    """Forward passes of a step, likewise."""
    base_ranks: int | None = None
    """Elastic jobs: the ranks whose global batch stays. None = the batch is resolved for the ranks anew."""
    has_volume: bool = True
    """Workers have one for spilled state."""
    most_workers: int = sys.maxsize
    """More are not proposed."""
    reader: Reader | None = None
    """None: nobody is asked."""

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> Terms:
        """What the file behind `config` says of the batch; `others` are the remaining fields."""
        given = {line.path: line.value for line in config.report if line.origin in ("file", "auto")}
        return cls(
            train_batch_size=given.get(TRAIN),
            micro_batch_size=given.get(MICRO),
            gradient_accumulation_steps=given.get(ACCUMULATION),
            **others,
        )

    def batch(self, world_size: int, edits: Edits) -> BatchConfig:
        """The batch of so many ranks once the file is changed. ConfigError where it does not divide."""
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
