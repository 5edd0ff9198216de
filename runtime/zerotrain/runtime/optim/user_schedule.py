"""A torch learning-rate schedule (or one like it) over the engine's parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerotrain.contract.config import ConfigError
from zerotrain.runtime.optim.json_state import from_plain, to_plain
from zerotrain.runtime.optim.optimizer import ZeroOptimizer


class TorchSchedule:
    """A schedule that the script made; the engine steps it after each update that was not skipped."""

    def __init__(self, scheduler: Any, optimizer: ZeroOptimizer) -> None:
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
