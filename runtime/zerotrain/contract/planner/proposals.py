"""The nearest configuration that fits: the mildest combination of changes, by a fixed price list.

The search goes by price, cheapest first, so the first that fits is the nearest. It is bounded by the size of
the model, because the operator runs it on its event loop. The engine's own check at the start of a job
(`memory/nearest.py`) tries fewer changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerotrain.contract.config import ConfigError
from zerotrain.contract.config.groups import can_group

from .changes import Change, changes
from .demand import Demand, Fit, Workload, demand
from .terms import Terms

MAX_EVALUATIONS = 400
MAX_MODULES = 20_000
"""Modules in all evaluated configurations, to which the cost of a search is proportional.

For a model of 96 layers this allows 200 configurations, for one of 1,024 layers 19.
"""
MAX_READINGS = 32
"""Configurations that are read as a file in one search.

Reading one costs as much as the evaluation of ten configurations.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A configuration that fits."""

    changes: tuple[str, ...]
    """Changes as a user would write them."""
    demand: Demand


def nearest(workload: Workload, terms: Terms | None = None) -> Proposal | None:
    """Return the mildest change after which everything fits; None if no evaluated change does.

    `terms`: other conditions on the changed job; None = only that its batch can be resolved.
    """
    terms = terms or Terms.of(workload.config)
    desk = _Desk(workload, terms)
    kinds = _by_kind(changes(workload, terms))
    queue: list[tuple[float, int, tuple[Change, ...], int]] = [(0.0, 0, (), 0)]
    pushed = looked_at = 0
    most = min(MAX_EVALUATIONS, max(1, MAX_MODULES // max(1, len(workload.shape.modules))))
    while queue and looked_at < most:
        _, _, chosen, first = heapq.heappop(queue)
        if desk.is_hopeless(chosen):
            continue
        if chosen:
            looked_at += 1
            found = _evaluate(workload, terms, chosen)
            found = desk.confirmed(found, chosen) if found is not None and _fits(found) else None
            if found is not None:
                return Proposal(changes=tuple(change.text for change in chosen), demand=found)
        for index in range(first, len(kinds)):
            for change in kinds[index]:
                pushed += 1
                price = sum(item.price for item in chosen) + change.price
                heapq.heappush(queue, (price, pushed, (*chosen, change), index + 1))
    return None


class _Desk:
    """Validation of changed jobs by the caller's reader, with as few calls as possible."""

    def __init__(self, workload: Workload, terms: Terms) -> None:
        self._workload = workload
        self._reader = terms.reader
        self._readings = 0
        self._refused: set[Change] = set()

    def is_hopeless(self, chosen: Sequence[Change]) -> bool:
        return not self._refused.isdisjoint(chosen)

    def confirmed(self, found: Demand, chosen: Sequence[Change]) -> Demand | None:
        """Return the real demand of the changed job, as the reader reads it.

        Returns None if the reader rejects the job or if it does not fit.
        """
        if self._reader is None:
            return found
        workload = self._read(chosen)
        if workload is not None:
            real = demand(workload)
            return real if _fits(real) else None
        # A change without which the reader accepts the others is to blame, and is not tried again.
        for blamed in chosen:
            if self._read([change for change in chosen if change is not blamed]) is not None:
                self._refused.add(blamed)
        return None

    def _read(self, chosen: Sequence[Change]) -> Workload | None:
        if self._reader is None or self._readings >= MAX_READINGS:
            return None
        self._readings += 1
        config = self._workload.config
        for change in chosen:
            config = change.apply(config)
        workers = replace(self._workload, config=config).workers
        return self._reader(_edits(chosen), workers)


def _fits(found: Demand) -> bool:
    """Return whether a demand fits; unknown limits are no obstacle."""
    return found.verdict in (Fit.FITS, Fit.UNKNOWN)


def _evaluate(workload: Workload, terms: Terms, chosen: Sequence[Change]) -> Demand | None:
    """Return the demand with these changes; None for a job that the engine would refuse."""
    config = workload.config
    for change in chosen:
        config = change.apply(config)
    zero = config.zero
    if zero.offload_param is not None and zero.stage < 3:
        return None
    if not can_group(stage=zero.stage, world_size=config.world_size, group_size=zero.zero_hpz_partition_size):
        return None
    try:
        batch = terms.batch(config.world_size, _edits(chosen))
    except ConfigError:
        return None
    return demand(replace(workload, config=replace(config, batch=batch)))


def _edits(chosen: Sequence[Change]) -> dict[str, Any]:
    return {path: value for change in chosen for path, value in change.edits.items()}


def _by_kind(found: Iterator[Change]) -> list[list[Change]]:
    kinds: dict[str, list[Change]] = {}
    for change in found:
        kinds.setdefault(change.kind, []).append(change)
    return list(kinds.values())
