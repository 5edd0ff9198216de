"""Entry point of the operator: `python -m zerotrain.operator`, which is `kopf run -A -m
zerotrain.operator.main`. The namespaces come from the environment: kopf watches none.

Importing this module registers the handlers; `zerotrain.operator.controller` holds them.
"""

from __future__ import annotations

from kopf.cli import main as kopf_command

from zerotrain.operator.controller.kopf_process import register

register()


def run() -> None:
    """Run the operator in this process until SIGTERM."""
    kopf_command(["run", "--all-namespaces", "--module", __name__])


__all__ = ["run"]
