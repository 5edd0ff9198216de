"""Inheritance of the alias by Python processes that this one starts.

A forked child has it already. One that starts a new interpreter (spawn, forkserver, subprocess) imports
`sitecustomize` before its program, and finds ours by PYTHONPATH.
"""

from __future__ import annotations

import os

STARTUP = os.path.join(os.path.dirname(__file__), "startup")
"""Folder with our `sitecustomize.py`, and nothing else."""


def reach_children() -> None:
    """Put our `sitecustomize` first on the PYTHONPATH of the processes that this one starts, once."""
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if STARTUP not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *others])
