"""Adapters of the PEFT library inside a sharded model: their parameters, and saving them.

PEFT writes them itself, so that `PeftModel.from_pretrained` can read the folder; this module passes it a
state dict that was gathered without the base model.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.runtime.checkpoint.files import fsync_folder, remove_tree
from zerotrain.runtime.checkpoint.group import RankGroup
from zerotrain.runtime.checkpoint.outcome import Outcome, agree
from zerotrain.runtime.weights.folder import TEMPORARY
from zerotrain.runtime.zero.access import full_parameters
from zerotrain.runtime.zero.names import has_wrappers, innermost, unwrapped

_CARD = "README.md"


def adapted(model: nn.Module) -> Any | None:
    """Return the PEFT model itself, without wrappers around it; None for any other model."""
    inner = innermost(model)
    return inner if _is_peft_model(inner) else None


def _is_peft_model(module: nn.Module) -> bool:
    return isinstance(module, getattr(sys.modules.get("peft"), "PeftModel", ()))


def adapter_parameters(model: nn.Module) -> set[int]:
    """Return the ids of all parameters of PEFT adapters, those of inactive adapters included."""
    found: set[int] = set()
    if "peft" not in sys.modules:
        return found
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        base = None
        if isinstance(module, BaseTunerLayer):
            base = getattr(module, "base_layer", None)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            base = module.original_module
        elif _is_peft_model(module):
            found |= {id(parameter) for parameter in _encoders(module)}
        if isinstance(base, nn.Module):
            own = {id(parameter) for parameter in module.parameters()}
            found |= own - {id(parameter) for parameter in base.parameters()}
    return found


def warn_of_wrapped_adapters(model: nn.Module) -> None:
    """Warn of wrappers inside a PEFT model: PEFT looks for its tensors under torch's names, which wrappers
    change."""
    if adapted(model) is not None and has_wrappers(model):
        warnings.warn(
            "modules of this PEFT model are compiled or wrapped by checkpoint_wrapper, and save_pretrained("
            "state_dict=...) of PEFT would not find their tensors, which have the plain model's names; call "
            "engine.save_16bit_model(folder, exclude_frozen_parameters=True), which writes the adapter",
            stacklevel=4,
        )


def save_adapters(model: Any, state: Mapping[str, Any], directory: Path, group: RankGroup) -> None:
    """Make PEFT write its folder (one below for every adapter that is not called "default"), and replace
    older files by the new ones. Collective; raises the same CheckpointError on all ranks."""
    is_first = group.rank == 0
    folder = directory / TEMPORARY

    def clear() -> None:
        if is_first:
            remove_tree(folder)

    def write() -> None:
        # Every rank calls it, since prompt tuning runs its encoder for the stored values.
        with torch.no_grad(), unwrapped(model):
            model.save_pretrained(folder, state_dict=dict(state), is_main_process=is_first)

    def publish() -> None:
        if is_first:
            _publish(folder, directory)

    try:
        with full_parameters(_encoders(model)):  # PEFT reads their parameters from the model
            for action in (clear, write, publish):
                # Any exception of PEFT: ranks that went on would wait for this one.
                agree(group, directory, Outcome.of(action, directory, catch=Exception))
    finally:
        clear()


def _encoders(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the encoder of prompt tuning."""
    encoders = model._modules.get("prompt_encoder") if _is_peft_model(model) else None
    return [] if encoders is None else list(encoders.parameters())


def _publish(folder: Path, directory: Path) -> None:
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        target = directory / path.relative_to(folder)
        if target.name == _CARD and target.exists():
            continue  # keep a model card that was written before
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, target)
        fsync_folder(target.parent)
