"""Parts of an engine: the attributes on which the mixins of this package may rely."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.clock import StepClock
from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.optim.optimizer import ZeroOptimizer
from zerotrain.runtime.optim.schedule import Schedule
from zerotrain.runtime.step import StepPipeline, StepResult
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.sharded_model import ShardedModel

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import LoadResult


class EngineParts:
    """Set by `Engine.__init__`; see its attributes."""

    module: nn.Module
    config: EngineConfig
    comm: Comm
    optimizer: ZeroOptimizer
    """The optimizer that `initialize` returned; None where it returned none (facade/evaluation.py)."""
    zero_optimizer: ZeroOptimizer
    """The optimizer for the engine's own use, also where nothing is trained."""
    schedule: Schedule
    """The schedule for the engine's own use; constant where none was given."""
    core: ShardedModel
    memory: MemoryLedger
    pipeline: StepPipeline
    clock: StepClock
    rank: int
    world_size: int
    device: torch.device
    global_steps: int
    skipped_steps: int
    micro_steps: int
    """Micro-batches so far, over all steps."""
    step_calls: int
    """Calls of `step` by this process; a load resets `micro_steps`, but never this."""
    last_step: StepResult | None
    last_load: LoadResult | None
    stop_agreed: bool
    _forced_boundary: bool | None = None
    """Value of `set_gradient_accumulation_boundary`; None = micro-batches are counted."""

    def check_open(self, what: str) -> None:
        """Raise RuntimeError after `close`, where `what` is impossible."""
        if self.core.is_closed:
            raise RuntimeError(f"{what} is not possible: this engine is closed")
        self.core.updates.check()

    def synchronize(self) -> None:
        """Wait for the update in the background, and bring weights on every rank up to date.

        Collective: call it on every rank. It does nothing where no update is running. Afterwards weights and
        states may be read on one rank alone, until the next `step`. Raises the error of the update. That
        error is final, as weights and states may then be of different steps: every later call raises it
        again, and nothing can be saved.
        """
        self.core.updates.settle_all()

    def meet_and_settle(self, what: str) -> None:
        """Wait until every rank has made this call, then keep or refuse what some wrote into weights.

        Raises CommError, and OutsideWrite, on every rank, if the ranks hold different values.
        """
        is_written = self.comm.meet(what, flag=self.core.writes.found())
        self.synchronize()
        if is_written:
            self.core.writes.settle()
