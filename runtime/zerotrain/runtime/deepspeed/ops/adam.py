"""`deepspeed.ops.adam`: optimizers to pass to `initialize`, which replaces them by its own sharded ones."""

from __future__ import annotations

from typing import Any

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]

__getattr__ = attributes_of(__name__)


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    **_other: Any,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, or Adam without `adam_w_mode`. Raises ValueError without bias correction."""
    if not bias_correction:
        raise ValueError(
            "bias_correction=False is not an option of an optimizer object; leave it out, and name the "
            'optimizer in the configuration: {"type": "AdamW", "params": {"bias_correction": false}}'
        )
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def DeepSpeedCPUAdam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    **_other: Any,
) -> torch.optim.Optimizer:
    """Return the same as `FusedAdam`; the configuration determines the tier of the states and the update
    kernel."""
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)
