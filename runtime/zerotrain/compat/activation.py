"""Activation of the alias in one process; the start of a child calls it as well, before its script."""

from __future__ import annotations

import sys

from zerotrain.compat.alias import DeepSpeedFinder
from zerotrain.compat.libraries import watch
from zerotrain.compat.processes import reach_children


def is_active() -> bool:
    return any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path)


def activate() -> None:
    """Make `import deepspeed` give our modules in this process and its children, once. Nothing is checked: in
    a child, its parent has decided. No torch is loaded."""
    if not is_active():
        sys.meta_path.insert(0, DeepSpeedFinder())
    watch()
    reach_children()
