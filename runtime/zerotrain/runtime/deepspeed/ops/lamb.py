"""`deepspeed.ops.lamb`: LAMB, to pass to `initialize`."""

from __future__ import annotations

from typing import Any

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.optim.user_optimizer import NamedOptimizer

__all__ = ["FusedLamb"]

__getattr__ = attributes_of(__name__)

_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "amsgrad": False,
}


class FusedLamb(NamedOptimizer):
    """The engine's Lamb with DeepSpeed's arguments, by name."""

    update_name = "Lamb"
    shared_options = ("bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff")

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        """Raises TypeError for an option that LAMB does not have, ValueError for one that the engine takes
        elsewhere."""
        unknown = sorted(options.keys() - _DEFAULTS.keys())
        if unknown:
            raise TypeError(f"FusedLamb has no argument {unknown}; it has {list(_DEFAULTS)}")
        if options.get("amsgrad"):
            raise ValueError("amsgrad must be False: LAMB has no such variant")
        if options.get("max_grad_norm"):
            raise ValueError(
                f"max_grad_norm must be 0, got {options['max_grad_norm']}: the configuration's "
                "gradient_clipping bounds the norm"
            )
        kept = {**_DEFAULTS, **options, "lr": lr}
        del kept["max_grad_norm"], kept["amsgrad"]
        super().__init__(params, kept)
