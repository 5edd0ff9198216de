"""`deepspeed.ops.adagrad`: an optimizer to pass to `initialize`, which replaces it by its own sharded one."""

from __future__ import annotations

from typing import Any

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["DeepSpeedCPUAdagrad"]

__getattr__ = attributes_of(__name__)


def DeepSpeedCPUAdagrad(
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **_other: Any
) -> torch.optim.Optimizer:
    """Return torch's Adagrad."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
