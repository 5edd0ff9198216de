"""Detection of one-step spikes of a series: a scrape every 30 s would miss them, a counter does not."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """Conditions under which a value counts as a spike."""

    factor: float
    """Multiple of the recent median that a value must exceed; a negative median it must exceed by as much."""
    spreads: float = 10.0
    """Multiple of the median distance from the median by which it must be away, so that noise is no spike."""
    window: int = 64
    """Number of recent values in the median."""
    min_values: int = 16
    """Number of values needed before any can be a spike: the first steps of a training vary widely."""


class SpikeDetector:
    """Compares each value with the median of those before it."""

    def __init__(self, rule: SpikeRule) -> None:
        self._rule = rule
        self._recent: deque[float] = deque(maxlen=rule.window)

    def observe(self, value: float) -> bool:
        """Return whether `value` is a spike. Non-finite values never are, and never enter the median."""
        if not math.isfinite(value):
            return False
        spike = len(self._recent) >= self._rule.min_values and self._stands_out(value)
        # A spike enters the window too: a lasting change becomes the new normal instead of firing forever.
        self._recent.append(value)
        return spike

    def _stands_out(self, value: float) -> bool:
        middle = _middle(sorted(self._recent))
        far = (self._rule.factor - 1) * abs(middle)
        # The second median is rarely needed; computing both would double the cost of every step.
        if value <= middle + far:
            return False
        spread = _middle(sorted(abs(item - middle) for item in self._recent))
        # A series of zeros, such as the norm of frozen gradients, offers no scale for comparison.
        return max(far, spread) > 0 and value > middle + self._rule.spreads * spread


def _middle(ordered: list[float]) -> float:
    """Return the median; statistics.median takes five times as long, at every step."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
