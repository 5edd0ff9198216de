"""The operator's entry: `kopf run -A -m zerotrain.operator.main`, or `python -m zerotrain.operator`.

Importing this module registers the handlers; `zerotrain.operator.handlers` holds them.
"""

from __future__ import annotations

from kopf.cli import main as kopf_command

from zerotrain.operator.handlers.watch import register

register()


def run() -> None:
    """Run in this process until SIGTERM."""
    kopf_command(["run", "--all-namespaces", "--module", __name__])


__all__ = ["run"]
