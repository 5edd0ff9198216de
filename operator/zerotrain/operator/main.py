"""The operator's entry: `python -m zerotrain.operator`, which is kopf with this module and the namespaces of
the environment (`kopf run -A -m zerotrain.operator.main` for all).

Importing this module registers the handlers; `zerotrain.operator.handlers` holds them.
"""

from __future__ import annotations

from kopf.cli import main as kopf_command

from zerotrain.operator.handlers.config import scope_flags
from zerotrain.operator.handlers.watch import register

register()


def run() -> None:
    """Run in this process until SIGTERM."""
    kopf_command(["run", *scope_flags(), "--module", __name__])


__all__ = ["run"]
