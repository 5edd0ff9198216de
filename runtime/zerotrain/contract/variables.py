"""The environment variables of a worker that the product reserves, and those of them that a job may set.

Only the job decides their values in a rank: a launcher in a pod reads them only from LAUNCH_VARIABLE, so
values that an image or a ConfigMap named by `envFrom` sets have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LAUNCH_VARIABLE: Final = "ZEROTRAIN_LAUNCH"
"""Variable with all variables of a launcher as one JSON object of strings."""

PREFIX: Final = "ZEROTRAIN_"
TORCH_VARIABLES: Final = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
        *("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }
)
"""Reserved names without the prefix: torch's `env://`."""

SETTABLE: Final = (
    "ZEROTRAIN_COLLECTIVE_DELAY_SECONDS",
    "ZEROTRAIN_CPU_THREADS",
    "ZEROTRAIN_KEEP_READABLE",
    "ZEROTRAIN_SPILL_ENGINE",
    "ZEROTRAIN_TRANSPORT",
    "ZEROTRAIN_SPILL_CRYPTO",
    "ZEROTRAIN_WATCHDOG_SECONDS",
)
"""Settings of the engine that a job sets in `podTemplate.env`, or a local run in its environment.

A script sets them in its environment, too.
"""


def is_reserved(name: str) -> bool:
    """Return whether the product reads the variable, or may read it in a later version."""
    return name.startswith(PREFIX) or name in TORCH_VARIABLES


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in `environ`."""
    return {name: environ[name] for name in SETTABLE if name in environ}


def without_reserved(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not is_reserved(name)}
