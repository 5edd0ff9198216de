"""`deepspeed.ops.lion`: Lion, to pass to `initialize`."""

from __future__ import annotations

from typing import Any

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.optim.user_optimizer import NamedOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]

__getattr__ = attributes_of(__name__)


class FusedLion(NamedOptimizer):
    """The engine's Lion; the configuration determines the tier of its state."""

    update_name = "Lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **_other: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})


class DeepSpeedCPULion(FusedLion):
    """The same as `FusedLion`."""
