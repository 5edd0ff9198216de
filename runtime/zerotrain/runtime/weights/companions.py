"""The files beside the weights that make a folder loadable: configuration, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerotrain.contract.strict_json import MAX_MODEL_CONFIG_BYTES, read_json

CONFIG = "config.json"

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def companions_of(
    folder: Path | None, config: Mapping[str, Any] | None, dtype: torch.dtype
) -> dict[str, Path | bytes]:
    """Return the files of the folder that a model came from, or its own configuration; config.json names the
    new dtype.

    Raises OSError or ValueError when the folder's config.json cannot be read.
    """
    found: dict[str, Path | bytes] = {}
    if folder is not None:
        found = {name: folder / name for name in _COPIED if (folder / name).is_file()}
        if (folder / CONFIG).is_file():
            config = read_json(
                folder / CONFIG, max_bytes=MAX_MODEL_CONFIG_BYTES, follow_link=True, finite=False
            )
    if config is not None:
        found[CONFIG] = json.dumps(_with_dtype(config, dtype), indent=2).encode() + b"\n"
    return found


def _with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    older = "torch_dtype" in config and "dtype" not in config
    return {**config, "torch_dtype" if older else "dtype": name}
