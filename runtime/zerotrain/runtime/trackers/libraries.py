"""The packages that trackers write through, and the check that they are installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from zerotrain.contract.config import ConfigError

PACKAGES = {
    "tensorboard": ("tensorboard", "zerotrain[tensorboard]"),
    "wandb": ("wandb", "zerotrain[wandb]"),
    "comet": ("comet_ml", "zerotrain[comet]"),
    # No extra: it needs an older Pillow than the rest of the pinned packages.
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "zerotrain[mlflow]"),
}
"""Module of a tracker, and what to install for it."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for the first tracker whose package is not installed."""
    for name in names:
        if name not in PACKAGES:
            continue
        module, install = PACKAGES[name]
        spec = find_spec(module)
        # A folder of that name, such as wandb makes for its files, is found, too, but has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"{name}.enabled",
                f"needs the package {module}, which is not installed",
                True,
                f"Install it with: pip install '{install}', in a job into its image; or set it to false.",
            )
