"""Optimizer states that are made at the first backward pass, so that evaluation alone costs none.

A run whose user named no optimizer starts with these (docs/adr/0053-evaluation.md). Until the first backward
pass they stand for states that are all zero and for masters that equal the weights; the digits that rounding
took from masters are kept from the start. Reading them takes no memory. Made by `tiers.StateTiers`; `make`
returns the states that a tier really stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerotrain.runtime.offload.states import Encoding, UnitStates, stored_dtype
from zerotrain.runtime.zero.buffer import flat_copy, flat_zeros
from zerotrain.runtime.zero.ledger import MemoryKind, MemoryLedger
from zerotrain.runtime.zero.rounding import join
from zerotrain.runtime.zero.state import MASTER, windows
from zerotrain.runtime.zero.unit import Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOn:
    """Device and ledger entry of the digits of masters that are kept until the states are made."""

    device: torch.device
    kind: MemoryKind
    ledger: MemoryLedger


class DeferredStates(UnitStates):
    """States of one unit that are not made yet. Used by one thread; no communication."""

    def __init__(
        self,
        unit: Unit,
        kinds: tuple[str, ...],
        encoding: Encoding,
        *,
        build: Callable[[torch.Tensor], UnitStates],
        kept_on: KeptOn | None,
    ) -> None:
        """Defer the states that `build` makes of fp32 masters and zeros. `kept_on` None: digits of masters
        are kept nowhere, so the states are made as soon as there are such digits."""
        super().__init__(unit, kinds, encoding)
        self.made: UnitStates | None = None
        self.on_made: Callable[[UnitStates], None] = lambda _: None
        """Callback that receives the states that replace this object."""
        self._build = build
        self._kept_on = kept_on
        self._kept: torch.Tensor | None = None
        """The array that the encoding stores of the masters; None = nothing beyond the weights."""

    def make(self) -> UnitStates:
        """Make the states from the masters as they are now and zeros, and return them. Raises what their tier
        raises; nothing is lost then."""
        if self.made is None:
            initial = self._masters()
            self._count(-1)
            try:
                self.made = self._build(initial)
            except BaseException:
                self._count(1)
                raise
            self._kept = None
            self.on_made(self.made)
        return self.made

    def drop(self) -> None:
        """Release the memory."""
        self._count(-1)
        self._kept = None

    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        if self.made is not None:
            return self.made.load(name, start, stop)
        if self._kept is not None and name == self.encoding.stored:
            return self._kept[start:stop]
        if name == MASTER:
            return self.read_weights(start, stop).float()
        return torch.zeros(stop - start, dtype=stored_dtype(self.unit, name))

    def store(self, name: str, start: int, values: torch.Tensor) -> None:
        if self.made is None and self._adds_nothing(name, values):
            return
        if self.made is None and name == self.encoding.stored and self._kept_on is not None:
            if self._kept is None:
                self._keep(_derived(self).to(self._kept_on.device))
            assert self._kept is not None
            self._kept[start : start + values.numel()].copy_(values)
            return
        self.make().store(name, start, values)

    @torch.no_grad()
    def take_initial(self, initial: torch.Tensor) -> None:
        """Take the first fp32 values, from which the weights were rounded."""
        if self.encoding is Encoding.WEIGHT or _is_exact(initial, self.unit.dtype):
            return
        if self._kept_on is None:
            self.made = self._build(initial)
        elif self.encoding is Encoding.FULL:
            self._keep(initial.to(self._kept_on.device))
        else:
            self._keep(_derived(self).to(self._kept_on.device))
            super().take_initial(initial)

    def take_weights(self, written: torch.Tensor) -> None:
        if self.made is not None or self._kept is not None:
            super().take_weights(written)

    def _adds_nothing(self, name: str, values: torch.Tensor) -> bool:
        """Return whether storing these values changes nothing: zeros of a state, or masters that
        equal the weights."""
        if name != MASTER:  # true of a remainder as well
            is_absent = self._kept is None or name != self.encoding.stored
            return is_absent and not values.any()
        return self._kept is None and _is_exact(values, self.unit.dtype)

    def _masters(self) -> torch.Tensor:
        """Return all masters in fp32: weights that are their own masters, the kept ones, or a new tensor."""
        if self.encoding is Encoding.WEIGHT:
            return self.read_weights(0, self.numel)
        kept = _derived(self) if self._kept is None else self._kept
        if self.encoding is Encoding.FULL:
            return kept
        weights = self.read_weights(0, self.numel)
        return join(weights, kept.to(weights.device))

    def _keep(self, array: torch.Tensor) -> None:
        self._kept = array
        self._count(1)

    def _count(self, sign: int) -> None:
        if self._kept is not None and self._kept_on is not None:
            self._kept_on.ledger.add(self._kept_on.kind, sign * self._kept.nbytes)


def _is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the dtype represents these fp32 values exactly."""
    if dtype is torch.float32:
        return True
    parts = (values[start:stop] for start, stop in windows(values.numel()))
    return all(torch.equal(part, part.to(dtype).float()) for part in parts)


def _derived(states: UnitStates) -> torch.Tensor:
    """Return a new tensor with what the encoding stores of masters that equal the weights."""
    if states.encoding is Encoding.SPLIT:
        return flat_zeros(states.numel, dtype=torch.int16, device=states.unit.comm.device)
    return flat_copy(states.read_weights(0, states.numel).to(states.unit.comm.device), torch.float32)
