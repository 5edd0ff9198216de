"""State of an engine that changes during training; its parts share one such object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from zerotrain.contract.config import EngineConfig
from zerotrain.runtime.facade.observer import NO_OBSERVER, EngineObserver
from zerotrain.runtime.step import StepResult
from zerotrain.runtime.trackers.monitor import Monitor

if TYPE_CHECKING:
    from zerotrain.runtime.checkpoint import LoadResult, SaveResult

Value = TypeVar("Value")


@dataclass(kw_only=True, slots=True)
class EngineState:
    """Counts, results and the present configuration of one engine."""

    config: EngineConfig
    """The resolved configuration; its batch changes with `set_train_batch_size`."""
    observer: EngineObserver = NO_OBSERVER
    """Observer that is notified of passes, saves and loads."""
    monitor: Monitor = field(default_factory=Monitor)
    """Trackers of the configuration."""
    global_steps: int = 0
    """Step boundaries so far, skipped ones included."""
    known_skips: int = 0
    """`skipped_steps`, without those of which the host does not know yet."""
    settle: Callable[[], None] = lambda: None
    """Makes the host know what became of the last step."""
    global_samples: int = 0
    """Samples of all steps so far, over all ranks."""
    micro_steps: int = 0
    """Micro-batches so far, over all steps."""
    step_calls: int = 0
    """Calls of `step` by this process; a load resets `micro_steps`, but never this."""
    is_at_boundary: bool = False
    """Whether the last call of `step` ended a step."""
    last_step: StepResult | None = None
    """Result of the last boundary, None before the first."""
    last_load: LoadResult | None = None
    """Result of the last `load_checkpoint`, None before."""
    last_save: SaveResult | None = None
    """The newest durable checkpoint of this engine."""
    saves_drop_gradients: bool = False
    """Whether a save inside gradient accumulation leaves the gradients out, instead of raising."""
    stop_requested: bool = False
    """Whether this rank asked to stop."""
    stop_agreed: bool = False
    """Whether a rank asked to stop before the last boundary; the same on every rank."""

    @property
    def skipped_steps(self) -> int:
        """Step boundaries whose gradient was not finite."""
        self.settle()
        return self.known_skips

    @skipped_steps.setter
    def skipped_steps(self, number: int) -> None:
        self.known_skips = number

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes per step."""
        return self.config.batch.gradient_accumulation_steps


class StateValue(Generic[Value]):
    """Attribute of an engine that is kept in its state, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, engine: None, owner: type) -> StateValue[Value]: ...

    @overload
    def __get__(self, engine: Any, owner: type) -> Value: ...

    def __get__(self, engine: Any, owner: type) -> StateValue[Value] | Value:
        if engine is None:
            return self
        value: Value = getattr(engine._state, self._name)
        return value

    def __set__(self, engine: Any, value: Value) -> None:
        setattr(engine._state, self._name, value)
