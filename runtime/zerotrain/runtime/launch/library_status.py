"""Progress of scripts that train without the engine, as transformers posts it where it is told of a server.

Its callback for Kubeflow's Trainer posts from rank 0, every five seconds: a share of the whole, and the last
logged numbers. The launcher shows them and judges nothing by them: of the other ranks, and of what happens
between two posts, nothing is known.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from zerotrain.contract.progress import Phase, Progress
from zerotrain.contract.strict_json import strict_json

STATUS_PATH = "/trainer-status"
LIBRARY_HEADER = "Authorization"
"""Header in which transformers sends the token."""
MAX_STATUS_BYTES = 64 << 10
TOKEN_NAME = "trainer-status.token"
_COUNTS = {"current_step": "step", "total_steps": "total_steps"}
_NUMBERS = {"loss": "loss", "grad_norm": "grad_norm"}


def receiver_environment(run_dir: Path, *, port: int) -> tuple[str, dict[str, str]]:
    """Return a new token, and the variables that make transformers post with it. Raises OSError."""
    token, path = secrets.token_urlsafe(32), run_dir / TOKEN_NAME
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(token)
    return token, {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{port}{STATUS_PATH}",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(path),
    }


def with_status(progress: Progress, body: bytes) -> Progress:
    """Return the record with what a posted status says. Raises ValueError for any other body."""
    status = _mapping(_mapping(strict_json(body)).get("trainerStatus"))
    changes: dict[str, Any] = {}
    metrics = status.get("metrics", [])
    if not isinstance(metrics, list):
        raise ValueError("trainerStatus.metrics must be a list")
    for item in metrics:
        name, text = _mapping(item).get("name"), _mapping(item).get("value")
        if name in _COUNTS:
            changes[_COUNTS[name]] = max(0, min(int(str(text)), 2**63 - 1))
        elif name in _NUMBERS and isfinite(value := float(str(text))):
            changes[_NUMBERS[name]] = value
    if "step" in changes:
        changes["phase"] = Phase.STEP
    return replace(progress, **changes)


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("the body must hold trainerStatus, and metrics with name and value in it")
    return value
