"""Which environment variables of a worker are the product's own, and which of these a job may set by name.

Nothing but the job decides what a rank reads from them: a launcher in a pod takes them from LAUNCH_VARIABLE
alone, so what an image or a ConfigMap named by `envFrom` sets has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LAUNCH_VARIABLE: Final = "ZEROTRAIN_LAUNCH"
"""All variables of a launcher as one JSON object of strings."""

PREFIX: Final = "ZEROTRAIN_"
TORCH_VARIABLES: Final = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
        *("NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }
)
"""The names without the prefix: torch's `env://`."""

SETTABLE: Final = (
    "ZEROTRAIN_COLLECTIVE_DELAY_SECONDS",
    "ZEROTRAIN_CPU_THREADS",
    "ZEROTRAIN_KEEP_READABLE",
    "ZEROTRAIN_SPILL_ENGINE",
    "ZEROTRAIN_TRANSPORT",
    "ZEROTRAIN_VAULT_CRYPTO",
    "ZEROTRAIN_WATCHDOG_SECONDS",
)
"""Settings of the engine that a job gives in `podTemplate.env`, and a local run or a script in its own
environment."""


def is_reserved(name: str) -> bool:
    """Whether the product reads the variable, or may one day."""
    return name.startswith(PREFIX) or name in TORCH_VARIABLES


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that `environ` holds."""
    return {name: environ[name] for name in SETTABLE if name in environ}


def without_reserved(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not is_reserved(name)}
