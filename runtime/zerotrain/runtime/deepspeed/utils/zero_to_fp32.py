"""`deepspeed.utils.zero_to_fp32`: a checkpoint's fp32 weights, as a state dict or as safetensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from zerotrain.runtime.deepspeed.absent import attributes_of
from zerotrain.runtime.weights.checkpoint_export import Request, export_checkpoint
from zerotrain.runtime.weights.plan import parse_size

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

__getattr__ = attributes_of(__name__)

Model = TypeVar("Model", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the fp32 weights and the buffers of a checkpoint in host memory, under the names of the model's
    state dict; tied ones under each of their names.

    It needs free space for them in the folder of temporary files. `lazy_mode` changes nothing: tensors are
    read from the temporary file when they are used. Raises CheckpointError when there is no such checkpoint
    or it is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fp32.safetensors"
        _export(checkpoint_dir, file, tag, exclude_frozen_parameters)
        return load_file(file)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a folder of safetensors. Raises ValueError for `safe_serialization=False`, which requests
    pickles, and errors as of `get_fp32_state_dict_from_zero_checkpoint`."""
    if not safe_serialization:
        raise ValueError(
            "safe_serialization must be True: weights are written as safetensors, never as pickles"
        )
    _export(
        checkpoint_dir, Path(output_dir), tag, exclude_frozen_parameters, max_bytes=parse_size(max_shard_size)
    )


def load_state_dict_from_zero_checkpoint(
    model: Model, checkpoint_dir: str | Path, tag: str | None = None
) -> Model:
    """Load the fp32 weights into a plain model, which is first moved to the host; return the model."""
    model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _export(checkpoint: str | Path, output: Path, tag: str | None, exclude_frozen: bool, **more: Any) -> None:
    export_checkpoint(
        Request(
            checkpoint=Path(checkpoint),
            output=output,
            dtype=torch.float32,
            tag=tag,
            exclude_frozen=exclude_frozen,
            every_name=True,
            **{"max_bytes": 1 << 62, **more},
        )
    )
