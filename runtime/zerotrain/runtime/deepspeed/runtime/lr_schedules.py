"""`deepspeed.runtime.lr_schedules`: the schedules by name, and as objects over a torch optimizer.

Their rates are those of the configuration's `scheduler` block. An object may be passed to
`initialize(lr_scheduler=...)`; the engine steps it then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, overload

import torch

from zerotrain.contract.config import SchedulerConfig
from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.optim.schedule import LrSchedule

__all__ = [
    "LR_RANGE_TEST",
    "LR_SCHEDULE",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

__getattr__ = attributes_of(__name__)

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
_REQUIRED = object()


class _Schedule:
    """A schedule of DeepSpeed's over `optimizer.param_groups`."""

    parameters: ClassVar[Mapping[str, Any]]
    """Arguments of the schedule after the optimizer, in order, with their defaults."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *values: Any, last_batch_iteration: int = -1, **named: Any
    ) -> None:
        """Write the first rates. Raises TypeError for unknown or missing arguments."""
        given = {**dict(zip(self.parameters, values, strict=False)), **named}
        unknown = sorted(given.keys() - self.parameters.keys())
        if unknown or len(values) > len(self.parameters):
            raise TypeError(
                f"{type(self).__name__} has no argument {unknown or list(values)}; it has "
                f"{list(self.parameters)}"
            )
        params = {**self.parameters, **given}
        missing = [name for name, value in params.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"{type(self).__name__} needs {missing}")
        self.optimizer = optimizer
        self._schedule = LrSchedule(
            _Groups(optimizer), SchedulerConfig(type=type(self).__name__, params=params)
        )
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Number of the last update, from 0; -1 before the first."""
        return self._schedule.num_updates - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write the rates that follow an update: the next one, or the given one."""
        done = self._schedule.num_updates if last_batch_iteration is None else last_batch_iteration
        self._schedule.load_state_dict({"num_updates": done + 1})

    def get_lr(self) -> list[float]:
        """Return the present rates, one per group."""
        return self._schedule.get_last_lr()

    def get_last_lr(self) -> list[float]:
        """Return the same as `get_lr`."""
        return self._schedule.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._schedule.load_state_dict({"num_updates": int(state["last_batch_iteration"]) + 1})


class _Groups(Sequence[dict[str, Any]]):
    """Groups of an optimizer at any time: `initialize` replaces the optimizer's groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(self._optimizer.param_groups)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        return self._optimizer.param_groups[index]


class LRRangeTest(_Schedule):
    """Rate that rises without end, to find the rate at which training diverges."""

    parameters: ClassVar[Mapping[str, Any]] = {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    }


class OneCycle(_Schedule):
    """One cycle of the rate up and down, with the momentum in the opposite direction, then a decay."""

    parameters: ClassVar[Mapping[str, Any]] = {
        "cycle_min_lr": _REQUIRED,
        "cycle_max_lr": _REQUIRED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    }


class WarmupLR(_Schedule):
    """Rise to a rate, which is then kept."""

    parameters: ClassVar[Mapping[str, Any]] = _WARMUP


class WarmupDecayLR(_Schedule):
    """Rise to a rate, then decay to zero at the end."""

    parameters: ClassVar[Mapping[str, Any]] = {"total_num_steps": _REQUIRED, **_WARMUP}


class WarmupCosineLR(_Schedule):
    """Rise to the optimizer's rate, then decay along a cosine."""

    parameters: ClassVar[Mapping[str, Any]] = {
        "total_num_steps": _REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    }
