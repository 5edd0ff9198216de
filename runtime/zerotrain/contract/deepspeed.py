"""The version of DeepSpeed that the product follows."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.19.8+zerotrain"
"""Version of DeepSpeed whose names and behaviour `zerotrain.runtime.deepspeed` has."""
