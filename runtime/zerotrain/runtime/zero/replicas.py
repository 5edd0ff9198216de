"""Gathers of updated weights into the replicas of all ranks, unit by unit; used by `pending.py`.

[Note: in flight after the step] The gather of a unit starts right after its update. Where it runs beside the
computation (on a GPU, over a network), the step does not wait for it: `Unit.pending` waits, when the unit is
used next, and until then its parameters are hidden (`placeholder.py`), so that no read from Python can miss
the wait. Every rank starts the same gathers within the step, in the same order, and a wait needs nobody
else: so any rank may use any unit at any time. What is left is waited for at the end of the model's forward,
at the next step, before anything reads or writes states, before a fork and at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import NamedTuple

from zerotrain.runtime.comm.streams import ComputeStream
from zerotrain.runtime.comm.timing import Pending
from zerotrain.runtime.zero.hooks import has_compiled_code
from zerotrain.runtime.zero.unit import Unit


class _Flight(NamedTuple):
    gather: Pending
    computed_on: ComputeStream
    """Stream on which the weights were updated; it waits for the gather, whichever other one does."""
    is_hidden: bool


class Replicas:
    """Gathers of one engine's updated units that are in flight; see [Note: in flight after the step]."""

    def __init__(
        self,
        *,
        most_numel: int,
        stays_in_flight: bool,
        settle: Callable[[Unit], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`most_numel`: about how many elements may be in flight where the step waits for them. `settle` is
        what uses of a unit call, and calls `finish`; `fail` gets the error of a gather. `stays_in_flight`:
        see `CoreOptions`."""
        self.seconds = 0.0
        """Seconds that the caller spent on starting gathers and waiting for them; never reset."""
        self.compiles_units = False
        """Whether the engine compiles the units' forward, within their hooks, and nobody a part of the
        model."""
        self._most_numel = most_numel
        self._may_stay = stays_in_flight
        self._settle, self._fail = settle, fail
        self._flying: dict[Unit, _Flight] = {}
        self._numel = 0
        _OPEN.add(self)

    @property
    def stay_in_flight(self) -> bool:
        """Whether a step ends before its gathers. Not once the caller compiled code: its guards look at
        parameters before any hook has shown them. It may differ between ranks."""
        return self._may_stay and (self.compiles_units or not has_compiled_code())

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._flying

    def publish(self, unit: Unit, *, is_hidden: bool = False) -> None:
        """Start to bring the replicas of a unit that was just updated up to date; sharded weights are
        gathered when they are used. Collective. `is_hidden`: the parameters are hidden already."""
        began = perf_counter()
        gather = unit.publish()
        if is_replica(unit):
            self._take_off(unit, gather, is_hidden=is_hidden)
        self.seconds += perf_counter() - began

    def end_step(self) -> None:
        """Wait for the gathers of a step, unless they stay in flight."""
        if not self.stay_in_flight:
            self.finish_all()

    def finish_all(self) -> None:
        """Wait for every gather."""
        self.finish(list(self._flying))

    def finish(self, units: Iterable[Unit]) -> None:
        """Wait for the gathers of these units, if any, and show their parameters. No communication."""
        began = perf_counter()
        try:
            for unit in units:
                if (flight := self._flying.get(unit)) is not None:
                    flight.computed_on.wait(flight.gather)
                    self._land(unit, flight)
        except BaseException as error:
            self._fail(error)  # a second wait would not find out that the weights are incomplete
            raise
        finally:
            self.seconds += perf_counter() - began

    def _take_off(self, unit: Unit, gather: Pending, *, is_hidden: bool) -> None:
        stays = self.stay_in_flight
        self._numel += unit.layout.padded_numel
        self._flying[unit] = _Flight(gather, ComputeStream.current(unit.comm.device), is_hidden or stays)
        unit.pending = partial(self._settle, unit)
        if stays:
            # In place, so that it takes no memory, however many there are.
            if not is_hidden:
                unit.views.hide_all()
            return
        while len(self._flying) > 1 and self._numel > self._most_numel:
            self.finish([next(iter(self._flying))])

    def _land(self, unit: Unit, flight: _Flight) -> None:
        del self._flying[unit]
        self._numel -= unit.layout.padded_numel
        unit.pending = None
        if flight.is_hidden:
            unit.views.show_all()


def is_replica(unit: Unit) -> bool:
    """Return whether each rank updates a part of weights that all ranks hold."""
    placement = unit.placement
    return placement.states_sharded and not placement.params_sharded and unit.comm.world_size > 1


_OPEN: weakref.WeakSet[Replicas] = weakref.WeakSet()


def _finish_everywhere() -> None:
    """Wait for what is in flight: a forked process could not, and other ranks need what this one sends."""
    if threading.current_thread() is not threading.main_thread():
        return  # the thread that trains may be waiting
    for replicas in list(_OPEN):
        with suppress(Exception):  # every later call of the engine raises it
            replicas.finish_all()


atexit.register(_finish_everywhere)
os.register_at_fork(before=_finish_everywhere)
