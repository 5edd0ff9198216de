"""Learning-rate schedules: those of the configuration, and torch's.

Those of the configuration are in closed form: the rate is a function of the number of updates made, nothing
else. Update k (from 0) uses the rate at k. Rates, parameter names and quirks are DeepSpeed's, so that a run
that is moved here goes on with the same rates: the warm-up schedules use their lowest rate for the first
update *and* start their curve with the second. Called by `initialize`; `Engine.step` advances them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerotrain.contract.config import ConfigError, SchedulerConfig
from zerotrain.runtime.optim.saved_values import from_plain, to_plain

Rate = Callable[[int, float], float]
"""Function (updates made, the group's base rate) -> rate."""


class Schedule(Protocol):
    """The schedule that `initialize` returns, and the methods that the engine needs of it."""

    num_updates: int
    """Number of updates made so far."""

    def step(self) -> None:
        """Advance by one update; the engine calls it after each update that was not skipped."""
        ...

    def get_last_lr(self) -> list[float]:
        """Return the rates that the next update uses, one per group."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Functions for the values that a schedule writes into one parameter group."""

    rate: Rate
    betas: Callable[[int], tuple[float, float]] | None = None
    """Function (updates made) -> betas; None leaves them unchanged."""


class LrSchedule:
    """A schedule that writes rates into an optimizer's groups. The engine steps it after each update."""

    def __init__(self, groups: Sequence[dict[str, Any]], config: SchedulerConfig | None) -> None:
        """Write the first rates; with `config` None every group keeps its own rate."""
        self._groups, self.config = groups, config
        self._base: list[float] = []
        self._curves: list[Curve] = []
        self.num_updates = 0
        self._write()

    def step(self) -> None:
        """Advance by one update."""
        self.num_updates += 1
        self._write()

    def undo(self) -> None:
        """Take back the last `step`, which no update followed. Values that were changed since then stay."""
        written = self._values()
        self.num_updates -= 1
        for group, before, now in zip(self._groups, written, self._values(), strict=False):
            group.update({key: value for key, value in now.items() if group[key] == before[key]})

    def get_last_lr(self) -> list[float]:
        """Return the rates that the next update uses, one per group."""
        return [float(group["lr"]) for group in self._groups]

    def get_lr(self) -> list[float]:
        """Return the rates of `get_last_lr`."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. The base rates stay those of this run's configuration."""
        self.num_updates = int(state["num_updates"])
        self._write()

    def _write(self) -> None:
        for index in range(len(self._base), len(self._groups)):  # all, or those added since
            self._base.append(float(self._groups[index]["lr"]))
            if self.config is not None:
                self._curves.append(_curve_of(self.config, index, len(self._groups)))
        for group, values in zip(self._groups, self._values(), strict=False):
            group.update(values)

    def _values(self) -> list[dict[str, Any]]:
        """Return the values that the schedule writes, by group; none where it is constant."""
        done, found = self.num_updates, []
        for base, curve in zip(self._base, self._curves, strict=False):
            betas = {} if curve.betas is None else {"betas": curve.betas(done)}
            found.append({"lr": curve.rate(done, base), **betas})
        return found


class TorchSchedule:
    """A torch schedule (or one like it) that the script made, over the engine's parameter groups. The engine
    steps it after each update that was not skipped."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Take the schedule over. Raises ConfigError where it has other groups, or needs a metric."""
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "lr_scheduler",
                "must be a function of the number of steps, which is all that the engine knows",
                type(scheduler).__name__,
                "Make it over the optimizer that initialize returns, and step it yourself.",
            )
        self.scheduler = scheduler
        self._groups = optimizer.param_groups
        self.num_updates = 0
        theirs = getattr(scheduler, "optimizer", None)
        if theirs is not None and theirs is not optimizer and theirs.param_groups is not self._groups:
            self._take_over(theirs)

    def __getattr__(self, name: str) -> Any:
        """Return the schedule's own attribute: scripts read more of theirs than the engine needs."""
        if name == "scheduler":  # not set yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def _take_over(self, theirs: Any) -> None:
        """Give the engine's groups to a schedule that was made over another optimizer."""
        if len(theirs.param_groups) != len(self._groups):
            raise ConfigError(
                "lr_scheduler",
                f"must be over the {len(self._groups)} parameter groups of the engine's optimizer",
                len(theirs.param_groups),
                "Pass the optimizer that it was made with to initialize too, or a function that makes it.",
            )
        for mine, other in zip(self._groups, theirs.param_groups, strict=True):
            mine.update({key: value for key, value in other.items() if key in ("lr", "initial_lr")})
        theirs.param_groups = self._groups

    def step(self) -> None:
        """Advance by one update."""
        self.num_updates += 1
        optimizer = getattr(self.scheduler, "optimizer", None)
        if optimizer is not None:
            optimizer._opt_called = True  # torch warns where its own optimizer did not step
        self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the rates that the next update uses, one per group."""
        return [float(group["lr"]) for group in self._groups]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values. Raises ValueError where the schedule keeps something that has no JSON form."""
        state = self.scheduler.state_dict()
        return {"num_updates": self.num_updates, "scheduler": to_plain(state, type(self.scheduler).__name__)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for the state of a schedule of the configuration, or of none."""
        if "scheduler" not in state:
            raise ValueError(
                "the checkpoint was written without a torch schedule, this run passes "
                f"lr_scheduler={type(self.scheduler).__name__}; keep the schedule as it was, or load with "
                "load_lr_scheduler_states=False"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. Raises ValueError as `check_state`."""
        self.check_state(state)
        self.num_updates = int(state["num_updates"])
        self.scheduler.load_state_dict(from_plain(state["scheduler"], self.scheduler.state_dict()))


def is_constant(schedule: Schedule) -> bool:
    """Return whether it only counts updates, as neither the configuration nor the caller gave a schedule."""
    return isinstance(schedule, LrSchedule) and schedule.config is None


def _curve_of(config: SchedulerConfig, group: int, num_groups: int) -> Curve:
    _check_lengths(config, num_groups)
    params = config.params
    if config.type == "WarmupLR":
        return Curve(rate=_warmup(params, group, after=lambda _: 1.0))
    if config.type == "WarmupDecayLR":
        warmup, total = _warmup_steps(params), int(params["total_num_steps"])
        return Curve(
            rate=_warmup(params, group, after=lambda k: max(0.0, (total - k) / max(1, total - warmup)))
        )
    if config.type == "WarmupCosineLR":
        return Curve(rate=_cosine(params))
    if config.type == "OneCycle":
        return _one_cycle(params, group)
    if config.type == "LRRangeTest":
        return Curve(rate=_range_test(params, group))
    raise ConfigError(
        "scheduler.type", "must be a schedule that this version runs", config.type, 'Set it to "WarmupLR".'
    )


def _check_lengths(config: SchedulerConfig, num_groups: int) -> None:
    """Raise ConfigError for a list that does not have one value per parameter group."""
    for name, value in config.params.items():
        if isinstance(value, (list, tuple)) and len(value) != num_groups:
            raise ConfigError(
                f"scheduler.params.{name}",
                f"must be one number, or one per parameter group, of which there are {num_groups}",
                value,
                "Write one number.",
            )


def _warmup_steps(params: Mapping[str, Any]) -> int:
    return max(2, int(params.get("warmup_num_steps", 1000)))


def _ramp(position: int, params: Mapping[str, Any]) -> float:
    """Return the progress of the warm-up, from 0 to 1."""
    steps = _warmup_steps(params)
    if params.get("warmup_type", "log") == "linear":
        return position / steps
    return math.log(position + 1) / math.log(steps)


def _warmup(params: Mapping[str, Any], group: int, *, after: Callable[[int], float]) -> Rate:
    low = _of_group(params.get("warmup_min_lr", 0.0), group)
    top = params.get("warmup_max_lr")

    def rate(k: int, base: float) -> float:
        position = max(0, k - 1)
        high = base if top is None else _of_group(top, group)
        gamma = _ramp(position, params) if position < _warmup_steps(params) else after(position)
        return low + (high - low) * gamma

    return rate


def _cosine(params: Mapping[str, Any]) -> Rate:
    total, warmup = int(params["total_num_steps"]), _warmup_steps(params)
    start, floor = float(params.get("warmup_min_ratio", 0.0)), float(params.get("cos_min_ratio", 1e-4))

    def rate(k: int, base: float) -> float:
        position = k - 1
        if position < 0:
            return 0.0
        if position < warmup:
            return base * (start + (1 - start) * _ramp(position, params))
        progress = min(1.0, (position - warmup + 1) / max(1, total - warmup))
        return base * max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return rate


def _range_test(params: Mapping[str, Any], group: int) -> Rate:
    """Return an ever rising rate, to find the one at which training breaks
    (https://arxiv.org/abs/1803.09820)."""
    low = _of_group(params.get("lr_range_test_min_lr", 1e-3), group)
    size = int(params.get("lr_range_test_step_size", 2000))
    per_size = float(params.get("lr_range_test_step_rate", 1.0))
    is_staircase = bool(params.get("lr_range_test_staircase", False))
    return lambda k, _base: low * (1 + per_size * (k // size if is_staircase else k / size))


def _one_cycle(params: Mapping[str, Any], group: int) -> Curve:
    """Return one cycle: up and down once, momentum the other way, then decay
    (https://arxiv.org/abs/1803.09820)."""
    first = int(params.get("cycle_first_step_size", 2000))
    second = int(_or(params.get("cycle_second_step_size"), first))
    stairs = int(params.get("cycle_first_stair_count", 0))
    later_stairs = int(_or(params.get("cycle_second_stair_count"), stairs))
    decay_size = int(params.get("decay_step_size", 0))
    total = first + second
    low, high = (_of_group(params[name], group) for name in ("cycle_min_lr", "cycle_max_lr"))
    least = _of_group(params.get("cycle_min_mom", 0.8), group)
    most = _of_group(params.get("cycle_max_mom", 0.9), group)

    def height(k: int) -> float:
        """Return the position in the cycle: 0 at its ends, 1 at its top."""
        position = k % total
        rises = position <= first
        count = stairs if rises else later_stairs
        part = position / first if rises else (total - position) / second
        return part if count <= 0 else math.floor(round(part * count, 9)) / count

    def decay(k: int, per_size: float) -> float:
        return 1 + (per_size * (k - total) / decay_size if decay_size else 0.0)

    def rate(k: int, _base: float) -> float:
        if k <= total:
            return low + (high - low) * height(k)
        return low / decay(k, float(params.get("decay_lr_rate", 0.0)))

    def betas(k: int) -> tuple[float, float]:
        if k == 0:
            return least, _CYCLE_BETA2
        if k <= total:
            return most - (most - least) * height(k), _CYCLE_BETA2
        return most * decay(k, float(params.get("decay_mom_rate", 0.0))), _CYCLE_BETA2

    return Curve(rate=rate, betas=betas if params.get("cycle_momentum", True) else None)


_CYCLE_BETA2 = 0.99
"""Second beta of OneCycle, as DeepSpeed's sets both betas."""


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _of_group(value: float | Sequence[float], group: int) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    return float(value[group])
