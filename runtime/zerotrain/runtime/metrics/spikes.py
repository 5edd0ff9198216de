"""Detects one-step spikes of a positive series: a scrape every 30 s would miss them, a counter does not."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeRule:
    """When a value counts as a spike."""

    factor: float
    """How many times the recent median a value must exceed."""
    window: int = 64
    """Recent values that make the median."""
    min_values: int = 16
    """Values needed before anything can be a spike: the first steps of a training are wild."""


class SpikeDetector:
    """Compares each value with the median of those before it."""

    def __init__(self, rule: SpikeRule) -> None:
        self._rule = rule
        self._recent: deque[float] = deque(maxlen=rule.window)

    def observe(self, value: float) -> bool:
        """Whether `value` is a spike. Non-finite values never are, and never enter the median."""
        if not math.isfinite(value):
            return False
        known = len(self._recent) >= self._rule.min_values
        spike = known and value > self._rule.factor * median(self._recent)
        # A spike enters the window too: a lasting change becomes the new normal instead of firing forever.
        self._recent.append(value)
        return spike
