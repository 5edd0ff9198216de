"""Updates that go on in the background while the next forward pass runs, and the fences that wait for them.

`StepPipeline` hands the units over; `Unit` calls `settle` before its weights are used or gathered, `Core` at
the ends of a pass, and everything that reads or writes states calls `settle_all` first.

[Note: fences] Only the main thread is here, so only it issues collectives, and what it issues depends on the
order of its own calls alone, never on how far the background is. Where the ranks hold replicas of weights
that each of them updates a part of (stages 1 and 2, small parameters of stage 3), a settled unit must be
published to all, and ranks may run different modules: so units are published in one canonical order, and
whoever needs one publishes all before it. Until then replicas are hidden from Python
(`placeholder.py`): a use settles them, or says that it cannot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Protocol

from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.unit import Unit, conceal, reveal


class UpdatePending(RuntimeError):
    """A weight was used on one rank while other ranks' parts of it are not there yet."""

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
            "go on from the last checkpoint"
        )


class Ticket(Protocol):
    """One unit's update in the background."""

    seconds: float
    """What it took there; 0.0 until it is over."""

    def wait(self) -> None:
        """Block until it is over; on CUDA the current stream waits for the weights. Raises what it met."""
        ...


class PendingUpdates:
    """Of one engine; see [Note: fences]. `fence_seconds` and `gather_seconds` grow for ever."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """What an update met. It is final: masters, moments and weights may be of different steps."""
        self.fence_seconds = 0.0
        """Seconds in which the caller waited for updates."""
        self.gather_seconds = 0.0
        """Seconds in which it published their results."""
        self.background_seconds = 0.0
        """Seconds of the updates themselves."""
        self.publish_numel = 1 << 62
        """Elements that may be in flight when many units are published."""
        self._traceback: TracebackType | None = None
        self._tickets: dict[Unit, Ticket] = {}
        self._stored: Ticket | None = None
        self._publication: list[Unit] = []
        """Of those, which are published, in the order in which they are."""
        self._gradients: Mapping[str, UnitGradients] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._tickets

    def check(self) -> None:
        """Raise what an update met before, if one did."""
        if self.failure is not None:
            # As it was first raised: a traceback would grow by every call that meets it.
            raise self.failure.with_traceback(self._traceback)

    def fail(self, error: BaseException) -> None:
        """An update met this; nothing else can be done with the engine."""
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
        """These updates go on from now on; when `stored` is over, all states are where they belong.

        `publication` holds the units in an order that is the same on every rank.
        """
        self._tickets, self._stored, self._gradients = dict(tickets), stored, gradients
        self._publication = [unit for unit in publication if unit in tickets and _is_published(unit)]
        for unit in tickets:
            unit.pending = partial(self.settle, unit)
            gradients[unit.name].slots.empty()
            if not unit.placement.params_sharded:
                conceal(unit)

    def settle(self, unit: Unit) -> None:
        """Wait for one unit's update and make its result the weights. Collective where replicas are
        published."""
        self.check()
        if unit not in self._tickets:
            return
        before = [unit]
        if _is_published(unit):
            before = self._publication[: self._publication.index(unit) + 1]
        self._settle(before)

    def settle_units(self) -> None:
        """The same for every unit. Collective where replicas are published."""
        self.check()
        if self._tickets:
            published = set(self._publication)
            self._settle([*(unit for unit in self._tickets if unit not in published), *self._publication])

    def settle_all(self) -> None:
        """`settle_units`, and wait until the states may be read."""
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
        """A hidden replica is used from Python: settle it if this rank may; say whether it was.

        Raises UpdatePending where all ranks would have to come here, which only a forward pass promises.
        """
        if unit not in self._tickets or unit.placement.params_sharded:
            return False
        if _is_published(unit) and not in_forward:
            raise UpdatePending(fqn)
        self.settle(unit)
        return True

    def _settle(self, units: Sequence[Unit]) -> None:
        fenced, began = self.fence_seconds, perf_counter()

        def settled() -> Iterator[Unit]:
            for unit in units:
                self._wait(self._tickets[unit])
                self._show(unit)
                yield unit

        try:
            publish_all(settled(), most_numel=self.publish_numel)
        except BaseException as error:
            # Of what is on its way to replicas, some are shown already, and nobody would wait for it again.
            if not isinstance(error, Exception) and any(_is_published(unit) for unit in units):
                self.fail(error)
            raise
        self.gather_seconds += perf_counter() - began - (self.fence_seconds - fenced)

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

    def _show(self, unit: Unit) -> None:
        self.background_seconds += self._tickets.pop(unit).seconds
        if self._publication and self._publication[0] is unit:
            del self._publication[0]
        unit.pending = None
        # On a device the main stream must do it.
        self._gradients[unit.name].clear(is_wiped=unit.comm.device.type == "cpu")
        if not unit.placement.params_sharded:
            reveal(unit)


def _is_published(unit: Unit) -> bool:
    """Whether each rank updates a part of weights that all hold."""
    placement = unit.placement
    is_replica = placement.states_sharded and not placement.params_sharded
    return is_replica and unit.comm.world_size > 1


def publish_all(units: Iterable[Unit], *, most_numel: int) -> None:
    """Bring everybody's replicas of updated units up to date, with about so many elements in flight.
    Collective."""
    flying: deque[tuple[int, Pending]] = deque()
    for unit in units:
        flying.append((unit.layout.padded_numel, unit.publish()))
        while len(flying) > 1 and sum(numel for numel, _ in flying) > most_numel:
            flying.popleft()[1].wait()
    for _, pending in flying:
        pending.wait()
