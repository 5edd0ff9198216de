"""Metadata of `deepspeed` as libraries read them, which say what it is here."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from zerotrain.contract.deepspeed import VERSION

METADATA = f"""\
Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: Not DeepSpeed: zerotrain's engine under DeepSpeed's names, in this process and its children only
Author: zerotrain
Project-URL: Documentation, docs/deepspeed.md of zerotrain

zerotrain.compat gives `zerotrain.runtime.deepspeed` to `import deepspeed`. The version is that of DeepSpeed
whose names these are; docs/deepspeed.md of zerotrain lists the names and the differences. No package of this
name is installed.
"""


class DeepSpeedDistribution(Distribution):
    """Distribution without files."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)
