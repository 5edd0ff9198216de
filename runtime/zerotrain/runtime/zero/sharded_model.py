"""The sharded model: owns the units and decides, on every hook, what to gather, free and reduce.

Called by `hooks.py` (from the user's modules and from autograd) and by the engine at step boundaries.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from zerotrain.runtime.comm.group import Comm
from zerotrain.runtime.zero.build import build_units, busy_modules
from zerotrain.runtime.zero.gradients import UnitGradients
from zerotrain.runtime.zero.hooks import COMPILER, Boundary, BoundaryHooks, Window, in_graph_task
from zerotrain.runtime.zero.layout import ModelLayout
from zerotrain.runtime.zero.ledger import MemoryLedger
from zerotrain.runtime.zero.live import LiveWeights
from zerotrain.runtime.zero.names import accept_plain_keys, named_modules
from zerotrain.runtime.zero.options import CoreOptions, EngineCallbacks
from zerotrain.runtime.zero.passes import Passes, RecordedOrder
from zerotrain.runtime.zero.pending import PendingUpdates, wait_before_loading
from zerotrain.runtime.zero.placeholder import Use, fqn_of
from zerotrain.runtime.zero.reduce import Reducer
from zerotrain.runtime.zero.state import StateTensors
from zerotrain.runtime.zero.unit import InitialValues, Unit, UnitState
from zerotrain.runtime.zero.uses import DirectUses, show_for_pass, unit_of
from zerotrain.runtime.zero.writes import Writes
from zerotrain.runtime.zero.zeropp import Traffic

if TYPE_CHECKING:
    from zerotrain.runtime.compiling.units import CompiledUnits
    from zerotrain.runtime.fp8.layers import Fp8Layers
    from zerotrain.runtime.spill.store import SpillStore


class Removable(Protocol):
    """Anything that undoes itself, such as the handle of a hook."""

    def remove(self) -> None:
        """Undo it."""
        ...


class ShardedModel:
    """One model, sharded in units over the ranks of one `Comm`."""

    layout: ModelLayout
    units: list[Unit]
    gradients: dict[str, UnitGradients]
    """Gradients of the trainable units, by name."""
    has_gradients = False
    """Whether a backward pass ran since the last step boundary."""
    in_backward = False
    _ends_backward_itself = True
    _has_run_backward = False
    is_torn = False
    """Whether a backward pass since the last step boundary raised, so that the gradients are incomplete."""
    is_closed = False
    given_buffer_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    """Original dtypes of the buffers that the engine cast, by name."""
    fp8: Fp8Layers | None = None
    """Linear layers that compute in FP8."""
    compiled: CompiledUnits | None = None
    """Modules of units whose forward is compiled."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        *,
        comm: Comm,
        options: CoreOptions,
        callbacks: EngineCallbacks,
        values: InitialValues,
        states: Mapping[str, StateTensors],
    ) -> None:
        """Take the model over: its parameters become views of the units' buffers. Collective.

        `states` are masters and optimizer states by unit; the optimizer may add them as units are made.
        """
        self.comm, self.callbacks, self.states = comm, callbacks, states
        self.ledger = MemoryLedger()
        self.holds: Counter[Unit] = Counter()
        """Number of `full_parameters` contexts that each unit is in."""
        self.knows_compiler = COMPILER in sys.modules
        """Whether the hooks are made so that torch.compile does not trace them."""
        self.options, self.model = options, model
        self.traffic = Traffic(comm, self.ledger, options.plus)
        self.reducer = Reducer(
            comm,
            self.ledger,
            options,
            start_exchange=self.traffic.start_exchange,
            keeps_local=callbacks.keeps_local,
        )
        self.passes = Passes(self)
        self.uses = DirectUses(self)
        self.writes = Writes(self)
        self._backward_order: RecordedOrder[Boundary] = RecordedOrder()
        self.live = LiveWeights(options.live)
        self.updates = PendingUpdates(
            publish_numel=options.publish_numel,
            stays_in_flight=options.stays_in_flight,
        )
        self._opened: list[Window] = []
        """Windows of the current pass; a retained graph may open them again."""
        self.boundaries: dict[str, Boundary] = {}
        """Boundaries by the name of their module."""
        self._handles: list[Removable] = [*wait_before_loading(model, self.updates)]
        units = build_units(self, layout, values, callbacks.on_unit_made)
        self._handles += accept_plain_keys(model)
        trained = [unit for unit in units if unit.layout.trainable]
        made = [UnitGradients(unit, self.ledger, options.make_moved) for unit in trained]
        self.replace_units(layout, units, {each.unit.name: each for each in made})

    def replace_units(
        self, layout: ModelLayout, units: list[Unit], gradients: dict[str, UnitGradients]
    ) -> None:
        """Use these units from now on; called between steps. Boundaries of modules that had units stay the
        same objects, because the caller may be a hook of the root."""
        self.layout, self.units, self.gradients = layout, units, gradients
        self.uses.forget()
        self.reducer.replace(list(gradients.values()))
        self.live.replace(units)
        busy = busy_modules(
            units,
            gradients,
            reduces_early=self.reducer.reduces_early,
            waits=self.options.just_in_time or self.options.stays_in_flight,
        )
        modules = dict(named_modules(self.model))
        for boundary in self.boundaries.values():
            boundary.units = busy.get(boundary.name, [])
        for name in [name for name in busy if name not in self.boundaries]:
            boundary = Boundary(modules[name], name, busy[name])
            self.boundaries[name] = boundary
            self._handles += BoundaryHooks(self, boundary, is_root=not name).attach()

    # --- forward

    def before_forward(self, boundary: Boundary, *, is_root: bool) -> Window | None:
        """Make the boundary's units whole and prefetch the next; return the window of this call, if it can
        have one."""
        recompute = in_graph_task()
        if not recompute and (is_root or self.passes.entry is None):
            self.passes.enter(boundary)
        for unit in boundary.units:
            unit.require(UnitState.BACKWARD if recompute else UnitState.FORWARD)
        if not recompute:
            order = self.passes.order
            order.visit(boundary)
            self.live.prefetch(order.upcoming())
        has_window = torch.is_grad_enabled() and bool(boundary.units or is_root)
        window = Window(self, boundary, is_recompute=recompute) if has_window else None
        boundary.calls.append(window)
        return window

    def after_forward(self, boundary: Boundary, window: Window | None, *, has_raised: bool = False) -> None:
        """Free the units unless backward needs them at once; `window` None = no gradient can come back
        here. A call that raised starts no gather: it may have raised on this rank alone."""
        if in_graph_task():
            return
        if window is not None:
            boundary.expected_windows += 1
        order = self.passes.order
        keep = window is not None and order.is_known and self.live.keeps(boundary.units, order.upcoming())
        keep = keep or bool(boundary.calls)  # the module called itself, and its outer call goes on
        for unit in boundary.units:
            # Gradients are on, but none is visible that will come back: backward could find the weights
            # freed.
            is_unclear = window is None and torch.is_grad_enabled() and unit.layout.trainable
            if not is_unclear and not keep:
                self.live.free([unit])
        if self.updates and not has_raised:
            # Not before this boundary's own forward, which is running on a device by now.
            self.live.prefetch(islice(order.upcoming(), 1), waits=True)
        if boundary is self.passes.entry and not boundary.calls:
            self.passes.leave(keep=keep)

    def open_for_use(self, parameter: nn.Parameter, use: Use) -> bool:
        """Make a sharded parameter usable outside of its module (`F.linear(x, self.embed.weight)`).

        Returns whether it is shown. In a call of the model its unit lives as long as the pass from now on.
        Otherwise it is lent, if that is allowed (`uses.py`), and the parameter stays hidden. Every rank runs
        the same code, so all call this.
        """
        if self.settle_for_use(parameter, use):
            return True
        unit, entry = unit_of(self, parameter), self.passes.entry
        if not unit.placement.params_sharded:
            return False
        if entry is None or entry.name:
            return self.uses.lend(parameter, use)
        show_for_pass(unit)
        return True

    def settle_for_use(self, parameter: nn.Parameter, use: Use | None = None) -> bool:
        """Show a parameter that is hidden until its update is on all ranks, if it may be used now; return
        whether it is shown.

        Raises UpdatePending if showing it needs all ranks.
        """
        unit = unit_of(self, parameter)
        if unit.pending is None or unit.placement.params_sharded:
            return False
        is_common = self.passes.entry is not None or (use is not None and self.uses.allows(use))
        return self.updates.open_for_use(unit, fqn_of(parameter), in_forward=is_common)

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError if `what` is not possible: while the model is in forward or backward, and after
        `close`."""
        if self.is_closed:
            raise RuntimeError(f"{what} is not possible: the engine of this model is closed")
        self.passes.check_stale()
        if self.passes.entry is not None or self.in_backward:
            phase = "backward" if self.passes.entry is None else "forward"
            raise RuntimeError(f"{what} is not possible while the model is in {phase}; call it between them")

    def check_open(self, what: str) -> None:
        """Raise RuntimeError after `close`, where `what` is impossible, and the error of a failed update."""
        if self.is_closed:
            raise RuntimeError(f"{what} is not possible: this engine is closed")
        self.updates.check()

    def meet_and_settle(self, what: str) -> None:
        """Wait until every rank has made this call, then keep or refuse what some wrote into weights.

        Raises CommError, and OutsideWrite, on every rank, if the ranks hold different values; LayoutError if
        a parameter was replaced or moved.
        """
        self.callbacks.check_places()
        is_written = self.comm.meet(what, flag=self.writes.found())
        self.updates.settle_all()
        if is_written:
            self.writes.settle()

    def check_step(self) -> None:
        """Raise RuntimeError while whole sharded parameters are held, which an update would leave stale, and
        after a backward pass of the step raised."""
        if self.is_torn or self.in_backward:
            raise RuntimeError(
                "step() is not possible after a backward pass that raised, as the step's gradients are "
                "incomplete; call zero_grad() of the engine or the optimizer on every rank and continue "
                "with another micro-batch"
            )
        stale = [unit.name for unit in self.holds if unit.placement.params_sharded]
        if stale:
            raise RuntimeError(
                f"step() is not possible within full_parameters, which holds {stale[:5]}; leave it first"
            )

    def drop_previous_pass(self) -> None:
        """Drop, at the begin of a pass, what an earlier one left that raised or had no backward pass."""
        if self.in_backward:  # the caller's own loss.backward() raised
            self.is_torn = True
            self.finish_backward()
        self.live.free(self.units, everything=True)
        for boundary in self.boundaries.values():
            boundary.calls.clear()

    # --- backward

    def begin_backward(self) -> None:
        """Begin a backward pass of the engine, which will call `loss.backward()` and then
        `finish_backward`."""
        self._ends_backward_itself = False
        self._start_pass()

    def open_window(self, window: Window) -> None:
        """Prepare backward of the window's module; called when a gradient reaches one of its outputs."""
        if window.is_open:
            return
        if not self.in_backward:
            self._start_pass()
            if self._ends_backward_itself:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.finish_backward)
        boundary = window.boundary
        window.is_open = True
        self._opened.append(window)
        boundary.open_windows += 1
        units = boundary.units
        if not boundary.name:
            units = [*units, *(unit for unit in self.units if unit.is_wide and unit not in units)]
        for unit in units:
            unit.require(UnitState.BACKWARD)
            if unit.layout.trainable:
                self.gradients[unit.name].attach()
        self._backward_order.visit(boundary)
        self.live.prefetch(self._backward_order.upcoming())

    def close_window(self, window: Window) -> None:
        """Reduce and free the module's units; called when every gradient of the window's forward call is
        computed."""
        if not window.is_open or window.is_closed:
            return
        window.is_closed = True
        boundary = window.boundary
        boundary.open_windows -= 1
        if not window.is_recompute:
            boundary.expected_windows -= 1
        boundary.num_ended += 1
        if boundary.open_windows:
            return
        if boundary.is_complete(is_recompute=window.is_recompute):
            for unit in boundary.units:
                if unit.layout.trainable and not unit.is_wide:
                    self.reducer.ready(self.gradients[unit.name])
        self.live.free(boundary.units)

    def finish_backward(self) -> None:
        """End the backward pass: reduce the remaining gradients and free everything."""
        self._ends_backward_itself = True
        if not self.in_backward:
            if self.passes.entry is None:
                self.live.free(self.units, everything=True)  # kept for a backward pass that was not run
            return
        self.in_backward = False
        self.reducer.finish()
        for boundary in self.boundaries.values():
            boundary.end_pass()
        for window in self._opened:
            window.is_open = window.is_closed = False
        self._opened.clear()
        self.live.free(self.units, everything=True)

    def _start_pass(self) -> None:
        callbacks = self.callbacks
        takes = bool(self.gradients) and callbacks.takes_gradients()
        if takes and self._ends_backward_itself:
            callbacks.on_own_backward()
        self.updates.settle_units()  # autograd writes into their gradients
        if not self._has_run_backward:
            callbacks.on_first_backward()
            self._has_run_backward = True
        self.passes.begin_backward()
        if takes and not self.has_gradients:
            callbacks.on_new_gradients()
        self.in_backward, self.has_gradients = True, self.has_gradients or takes
        self.reducer.begin(at_boundary=takes and callbacks.at_boundary())
        self._backward_order.begin()

    # --- shared

    def until_closed(self, handle: Removable) -> None:
        """Remove a hook, or what has the same method, when the model is closed."""
        self._handles.append(handle)

    def close(self) -> None:
        """Remove every hook and the spill file; the model keeps its parameters."""
        self.is_closed = True
        for gradients in self.gradients.values():
            if gradients.sum.moved is not None:
                gradients.sum.moved.wait()  # copies into memory that may be freed from now on
            if gradients.slots.are_hidden:
                gradients.slots.empty()
        self.traffic.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.options.staging is not None:
            self.options.staging.close()
        if self.options.spill_store is not None:
            self.options.spill_store.close()


def has_lost_spill(core: ShardedModel) -> bool:
    """Return whether the spill file of this rank has failed, which no other rank knows."""
    spill_store = used_spill_store(core)
    try:
        return spill_store is not None and spill_store.file is None
    except Exception:  # the spill store's first error, which was raised where it occurred
        return True


def used_spill_store(core: ShardedModel) -> SpillStore | None:
    """Return the spill storage of this rank; None also if nothing is spilled although the configuration
    allows it."""
    spill_store = core.options.spill_store
    return spill_store if spill_store is not None and spill_store.memory.file else None


def update_order(core: ShardedModel) -> list[Unit]:
    """Return the trainable units in the order in which this rank's last forward pass used them, then the
    rest."""
    used = [unit for boundary in core.passes.trained.recorded() for unit in boundary.units]
    return [unit for unit in dict.fromkeys([*used, *core.units]) if unit.name in core.gradients]


def publication_order(core: ShardedModel) -> list[Unit]:
    """Return the trainable units in the agreed order of forward, which is the reverse of that of
    reductions."""
    return [gradients.unit for gradients in reversed(core.reducer.order)]
