"""Options of the sharding, and the functions of the engine that a sharded model calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from zerotrain.runtime.zero.gradient_sum import MakeSum
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.live import LiveLimits
from zerotrain.runtime.zero.shards import ParamTier, Placement, Staging
from zerotrain.runtime.zero.unit import Unit
from zerotrain.runtime.zero.zeropp import ZeroPlusPlus

if TYPE_CHECKING:
    from zerotrain.runtime.spill.store import SpillStore
    from zerotrain.runtime.zero.hooks import Boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreOptions:
    """Options of the sharding, which the engine derives from the configuration."""

    placement: Placement
    live: LiveLimits = field(default_factory=LiveLimits)
    """Limits of what is gathered at once."""
    wire_dtype: str | None = None
    """Dtype in which gradients are sent, if narrower than autograd's."""
    overlap: bool = True
    """Whether gradients are reduced while backward runs."""
    reduce_bucket_numel: int = 1 << 62
    """Elements of finished units that may be in flight during backward."""
    predivision: float = 1.0
    """Divisor of the gradients before they are sent."""
    averages: bool = True
    """Whether the gradients of the ranks are averaged; False = summed."""
    plus: ZeroPlusPlus = field(default_factory=ZeroPlusPlus)
    just_in_time: bool = False
    """Whether updates may run in the background when a forward pass begins (zero/pending.py)."""
    tier: ParamTier | None = None
    """Tier that keeps the shards of units outside of the device; None = they stay on the device."""
    staging: Staging | None = None
    """Host buffers for the shards of a tier; see `HasShard.staging`."""
    publish_numel: int = 1 << 62
    """Elements in flight when many units are published after an update and waited for."""
    stays_in_flight: bool = False
    """Whether a step ends while updated units are gathered (zero/replicas.py)."""
    make_moved: MakeSum | None = None
    """Makes the sums of gradients that leave the device for the host; None = all stay."""
    spill_store: SpillStore | None = None
    """Spill storage of this rank, also for the optimizer's states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCallbacks:
    """Functions of the engine and its optimizer that the model calls; no collectives unless stated."""

    on_unit_made: Callable[[Unit, MemoryLedger], None]
    """Called for every unit before the next one is made; may take its `initial_master`."""
    on_weights_written: Callable[[Unit, torch.Tensor], None]
    """Called with a unit and its whole weights when user code changed them, before the shard changes."""
    on_entry: Callable[[Boundary, Any, Any], tuple[Any, Any]]
    """Called with the arguments of the outermost forward call; returns those to use."""
    before_pass: Callable[[], None]
    """Called when a forward pass with gradients begins; may call `replace_units`. Collective."""
    on_evaluation: Callable[[], None]
    """Called when a forward pass without gradients or in evaluation mode begins."""
    check_places: Callable[[], None]
    """Called before weights are saved, loaded or exported; raises where a parameter was replaced or moved."""
    takes_gradients: Callable[[], bool]
    """Called when a backward pass begins; returns whether it gives any parameter a gradient."""
    on_own_backward: Callable[[], None]
    """Called when the user's code, not the engine, calls `backward`."""
    on_first_backward: Callable[[], None]
    """Called once, when the first backward pass begins."""
    on_new_gradients: Callable[[], None]
    """Called when the first backward pass of a step begins."""
    at_boundary: Callable[[], bool]
    """Whether the backward pass that starts is the last one before the step."""
    keeps_local: Callable[[], bool]
    """Whether stages 0 and 1 send nothing now, because the optimizer needs each rank's own sums."""
    gradient_scale: Callable[[], float]
    """Factor of the loss scaling in the accumulated gradients."""
    close: Callable[[], None]
    """Closes the engine. Collective."""
