"""`deepspeed.runtime.zero.partition_parameters`: names that libraries import from it beside
`deepspeed.zero`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.deepspeed.accelerator import get_accelerator
from zerotrain.runtime.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)
from zerotrain.runtime.zero.labels import ZeroParamStatus
from zerotrain.runtime.zero.placeholder import ShardedParameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

__getattr__ = attributes_of(__name__)

_orig_torch_arange = torch.arange
"""Original constructor, for transformers, which checks which constructor is wrapped; none is."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Return the constructor itself: `zero.Init` changes no dtype and wraps no function. transformers
    replaces this name while it builds a model, which has no effect here."""
    return fn


def is_zero_param(parameter: object) -> bool:
    """Return whether the values of a parameter are on other ranks now, so that it has `ds_id` and similar
    attributes."""
    return isinstance(parameter, ShardedParameter)
