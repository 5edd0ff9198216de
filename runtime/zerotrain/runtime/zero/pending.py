"""Updates that run in the background during the next forward pass, and the fences that wait for them.

`StepPipeline` starts the updates; `Unit` calls `settle` before its weights are used or gathered,
`ShardedModel` at the ends of a pass, and everything that reads or writes states calls `settle_all` first.

[Note: fences] Only the main thread runs this code, so only it issues collectives. What it issues depends only
on the order of its own calls, never on the progress of the background. If the ranks hold replicas of weights
that each of them updates a part of (stages 1 and 2, small parameters of stage 3), a settled unit must be
published to all, and ranks may run different modules. So units are published in one canonical order, and
settling one publishes all before it. Until then replicas are hidden from Python (`placeholder.py`): a use
settles them, or raises an error. `replicas.py` gathers them, and waits for the gathers, also those of steps
that update in the foreground.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any

from torch import jit, nn
from torch.utils.hooks import RemovableHandle

from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.replicas import Replicas, is_replica
from zerotrain.runtime.zero.unit import Unit


class UpdatePending(RuntimeError):
    """A weight was used on one rank while other ranks' parts of it are not available yet."""

    def __init__(self, fqn: str) -> None:
        super().__init__(
            f"parameter {fqn!r} is being updated in the background after engine.step(), and its values come "
            "from every rank; call engine.synchronize() on every rank before using it here, or set "
            "zero_optimization.offload_optimizer.just_in_time to false"
        )


class UpdateInterrupted(RuntimeError):
    """Ctrl-C came while units of one step were updated or published."""

    def __init__(self) -> None:
        super().__init__(
            "an optimizer step was interrupted between two units, so the weights are of different steps; "
            "resume from the last checkpoint"
        )


class Ticket:
    """A handle on one unit's update in the background, which the thread of the updates makes and ends."""

    __slots__ = ("_done", "_error", "_on_wait", "_pid", "seconds")

    def __init__(self, on_wait: Callable[[], None] | None) -> None:
        self.seconds = 0.0
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._on_wait = on_wait
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not block. For observation only: what ranks do must not depend on it."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the update is over, and make the device wait for its copies. Raises the update's
        error."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the weights are being updated by a thread of the parent process, which a forked process "
                "does not have; call engine.synchronize() before the fork"
            )
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._on_wait is not None:
            self._on_wait()

    def end(self, seconds: float, error: BaseException | None = None) -> None:
        """Mark the update as finished; called by the thread."""
        self.seconds, self._error = seconds, error
        self._done.set()


class PendingUpdates:
    """Updates of one engine that are not over, or whose results are not on all ranks yet; see [Note: fences].
    `fence_seconds` is never reset."""

    def __init__(self, *, publish_numel: int, stays_in_flight: bool) -> None:
        """Take the options of the same names in `CoreOptions`."""
        self.failure: BaseException | None = None
        """First error of an update. It is final: masters, moments and weights may be of different steps."""
        self.fence_seconds = 0.0
        """Seconds in which the caller waited for updates."""
        self.background_seconds = 0.0
        """Seconds of the updates themselves."""
        self.replicas = Replicas(
            most_numel=publish_numel,
            stays_in_flight=stays_in_flight,
            settle=self.settle,
            fail=self.fail,
        )
        self._traceback: TracebackType | None = None
        self._tickets: dict[Unit, Ticket] = {}
        self._stored: Ticket | None = None
        self._publication: list[Unit] = []
        """Units with pending updates that have to be published, in the order of publication."""
        self._gradients: Mapping[str, UnitGradients] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def __contains__(self, unit: Unit) -> bool:
        """Whether the unit's update may still be running, and reading its gradients."""
        return unit in self._tickets

    def check(self) -> None:
        """Raise the error of an earlier update, if there was one."""
        if self.failure is not None:
            # With its first traceback, which would otherwise grow with every call that raises it.
            raise self.failure.with_traceback(self._traceback)

    def fail(self, error: BaseException) -> None:
        """Record the error of an update, after which the engine cannot be used any more."""
        final = error if isinstance(error, Exception) else UpdateInterrupted()
        self.failure, self._traceback = final, error.__traceback__

    def begin(
        self,
        tickets: Mapping[Unit, Ticket],
        stored: Ticket,
        *,
        gradients: Mapping[str, UnitGradients],
        publication: Sequence[Unit],
    ) -> None:
        """Register updates that were started; when `stored` is over, all states are stored.

        `publication` holds the units in an order that is the same on every rank.
        """
        self._tickets, self._stored, self._gradients = dict(tickets), stored, gradients
        self._publication = [unit for unit in publication if unit in tickets and is_replica(unit)]
        for unit in tickets:
            unit.pending = partial(self.settle, unit)
            gradients[unit.name].slots.empty()
            if not unit.placement.params_sharded:
                unit.views.hide_all()

    def settle(self, unit: Unit) -> None:
        """Wait for one unit's update and make its result the weights. Collective if replicas have to be
        published."""
        self.check()
        if unit in self._tickets:
            before = [unit]
            if is_replica(unit):
                before = self._publication[: self._publication.index(unit) + 1]
            self._publish(before)
        self.replicas.finish([unit])

    def settle_units(self) -> None:
        """Settle every unit. Collective if replicas have to be published."""
        self.check()
        if self._tickets:
            published = set(self._publication)
            self._publish([*(unit for unit in self._tickets if unit not in published), *self._publication])
        self.replicas.finish_all()

    def settle_all(self) -> None:
        """Settle every unit and wait until the states may be read."""
        self.settle_units()
        self._wait_stored()

    def wait(self, units: Iterable[Unit] | None = None) -> None:
        """Wait until this rank's states of the units (None = all) may be read; nothing is published or shown.
        No collective."""
        self.check()
        for unit in self._tickets if units is None else units:
            if unit in self._tickets:
                self._wait(self._tickets[unit])
        if units is None:
            self._wait_stored()

    def open_for_use(self, unit: Unit, fqn: str, *, in_forward: bool) -> bool:
        """Settle a hidden replica that Python code uses, if this rank may; return whether it did.

        Raises UpdatePending if all ranks would have to call this, which only a forward pass guarantees.
        """
        if unit.pending is None or unit.placement.params_sharded:
            return False
        if unit in self._tickets and is_replica(unit) and not in_forward:
            raise UpdatePending(fqn)
        self.settle(unit)
        return True

    def _publish(self, units: Sequence[Unit]) -> None:
        """Wait for the updates of units, and start to gather those that are replicas."""
        try:
            for unit in units:
                self._wait(self._tickets[unit])
                self._take_over(unit)
            self.replicas.end_step()
        except BaseException as error:
            # Some of the replicas may be published already, and no later call would do that again.
            if not isinstance(error, Exception) and any(is_replica(unit) for unit in units):
                self.fail(error)
            raise

    def _wait_stored(self) -> None:
        if self._stored is not None:
            self._wait(self._stored)
            self._stored = None

    def _wait(self, ticket: Ticket) -> None:
        began = perf_counter()
        try:
            ticket.wait()
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self.fence_seconds += perf_counter() - began

    def _take_over(self, unit: Unit) -> None:
        """Make the result of a unit's update, which is over, the weights."""
        self.background_seconds += self._tickets.pop(unit).seconds
        if self._publication and self._publication[0] is unit:
            del self._publication[0]
        unit.pending = None
        # On a device the main stream must clear it.
        self._gradients[unit.name].clear(is_wiped=unit.comm.device.type == "cpu")
        if not unit.placement.params_sharded and not is_replica(unit):
            unit.views.show_all()
        self.replicas.publish(unit, is_hidden=True)


class WaitForUpdates:
    """Hook before `load_state_dict` writes into a module: it waits for pending updates, which would overwrite
    the loaded values. Does nothing in a copy of the module."""

    __slots__ = ("_updates",)

    def __init__(self, updates: PendingUpdates | None) -> None:
        self._updates = None if updates is None else weakref.ref(updates)

    def __call__(self, *_arguments: object) -> None:
        if self._updates is not None and (updates := self._updates()) is not None:
            updates.settle_all()

    def __reduce__(self) -> Any:
        return type(self), (None,)


def wait_before_loading(model: nn.Module, updates: PendingUpdates) -> list[RemovableHandle]:
    """Hook every module; calls of modules do not trigger the hook. `writes.py` finds what was loaded."""
    hook = WaitForUpdates(updates)
    return [
        module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        for module in model.modules()
        if not isinstance(module, jit.ScriptModule)
    ]
