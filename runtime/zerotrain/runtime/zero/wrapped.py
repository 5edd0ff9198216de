"""Refuses, at the start, models that other libraries already shard or replicate, and says what to do.

Two of them at once would average gradients twice, hide parameters from each other, or hang.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import jit, nn

from zerotrain.runtime.zero.layout import LayoutError
from zerotrain.runtime.zero.names import all_modules, named_parameters


@dataclass(frozen=True, slots=True)
class _Kind:
    """A torch class, which the module `home` has once that is loaded."""

    home: str
    name: str
    shown: str
    does: str
    has_module: bool = False
    """Whether it keeps the bare module in its attribute `module`."""


_AVERAGES, _SHARDS = "averages gradients", "shards parameters"
_KINDS = (
    _Kind(
        "torch.nn.parallel",
        "DistributedDataParallel",
        "DistributedDataParallel",
        _AVERAGES,
        has_module=True,
    ),
    _Kind("torch.nn.parallel", "DataParallel", "DataParallel", "divides batches over GPUs", has_module=True),
    _Kind("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)", _SHARDS),
    _Kind("torch.distributed._composable.replicate", "DDP", "replicate()", _AVERAGES),
    _Kind("torch.distributed.fsdp", "FSDPModule", "fully_shard() (FSDP2)", _SHARDS),
)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise LayoutError if a part of the model uses torch's data parallelism, sharding or DTensors."""
    for name, module in all_modules(model):
        for kind in _KINDS:
            if isinstance(module, getattr(sys.modules.get(kind.home), kind.name, ())):
                raise LayoutError(_text(name, kind))
        if isinstance(module, jit.ScriptModule) and any(True for _ in module.parameters()):
            raise LayoutError(
                f"{_place(name)} is made by torch.jit.script or torch.jit.trace, whose code uses its "
                "parameters where the engine does not see it; train the module that it was made of, and "
                "script it afterwards"
            )
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, parameter in named_parameters(model):
        if isinstance(parameter, dtensor):
            raise LayoutError(
                f"parameter {name!r} is a DTensor (parallelize_module and distribute_tensor make them), "
                "which the engine does not shard; build the model without it. A model that is divided by "
                "its own layers trains with initialize(mpu=...)"
            )


def _text(name: str, kind: _Kind) -> str:
    if not kind.has_module:
        way_out = "build the model without it"
    elif name:
        way_out = f"put the bare module in its place, as in `model.{name} = model.{name}.module`"
    else:
        way_out = "pass the bare model, which is its attribute `module`"
    return (
        f"{_place(name)} is wrapped by {kind.shown}, which {kind.does} as the engine itself does; {way_out}, "
        "and leave that to zerotrain.runtime.initialize"
    )


def _place(name: str) -> str:
    return f"module {name!r} of the model" if name else "the model"
