"""Learning-rate schedules in closed form: the rate is a function of the number of updates made, nothing else.

Update k (from 0) uses the rate at k. Shapes and parameter names follow DeepSpeed's schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerotrain.contract.config import ConfigError, SchedulerConfig

Rate = Callable[[int, float], float]
"""(updates made, the group's base rate) -> rate."""


class LrSchedule:
    """Writes rates into an optimizer's groups. `step()` is called by the engine after each update."""

    def __init__(self, groups: Sequence[dict[str, Any]], config: SchedulerConfig | None) -> None:
        """`config` None keeps every group's own rate."""
        self._groups = groups
        self._base = [float(group["lr"]) for group in groups]
        self._rates = [_rate_of(config, index) for index in range(len(groups))] if config else None
        self.num_updates = 0
        self._write()

    def step(self) -> None:
        """Move on by one update."""
        self.num_updates += 1
        self._write()

    def get_last_lr(self) -> list[float]:
        """The rates that the next update uses, one per group."""
        return [float(group["lr"]) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`. The base rates stay those of this run's configuration."""
        self.num_updates = int(state["num_updates"])
        self._write()

    def _write(self) -> None:
        if self._rates is not None:
            for group, base, rate in zip(self._groups, self._base, self._rates, strict=True):
                group["lr"] = rate(self.num_updates, base)


def _rate_of(config: SchedulerConfig, group: int) -> Rate:
    params = config.params
    if config.type == "WarmupLR":
        return _warmup(params, group, after=lambda _: 1.0)
    if config.type == "WarmupDecayLR":
        warmup, total = _warmup_steps(params), int(params["total_num_steps"])
        return _warmup(params, group, after=lambda k: max(0.0, (total - k) / max(1, total - warmup)))
    if config.type == "WarmupCosineLR":
        return _cosine(params)
    raise ConfigError(
        "scheduler.type", "must be a schedule that this version runs", config.type, 'Set it to "WarmupLR".'
    )


def _warmup_steps(params: Mapping[str, Any]) -> int:
    return max(2, int(params.get("warmup_num_steps", 1000)))


def _ramp(k: int, params: Mapping[str, Any]) -> float:
    """0 to 1 over the warm-up."""
    steps = _warmup_steps(params)
    if params.get("warmup_type", "log") == "linear":
        return k / steps
    return math.log(k + 1) / math.log(steps)


def _warmup(params: Mapping[str, Any], group: int, *, after: Callable[[int], float]) -> Rate:
    low = _of_group(params.get("warmup_min_lr", 0.0), group)
    top = params.get("warmup_max_lr")

    def rate(k: int, base: float) -> float:
        high = base if top is None else _of_group(top, group)
        gamma = _ramp(k, params) if k < _warmup_steps(params) else after(k)
        return low + (high - low) * gamma

    return rate


def _cosine(params: Mapping[str, Any]) -> Rate:
    total, warmup = int(params["total_num_steps"]), _warmup_steps(params)
    start, floor = float(params.get("warmup_min_ratio", 0.0)), float(params.get("cos_min_ratio", 1e-4))

    def rate(k: int, base: float) -> float:
        if k < warmup:
            return base * (start + (1 - start) * _ramp(k, params))
        progress = (k - warmup + 1) / max(1, total - warmup)
        return base * max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return rate


def _of_group(value: float | Sequence[float], group: int) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    return float(value[group])
