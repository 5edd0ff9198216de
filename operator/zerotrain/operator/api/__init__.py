"""Models of ZeroTrainingJob, the API of zerotrain. Used by the operator, the client and the CLI.

Names are imported at their first use: who reads only a status does not wait for the models of the spec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hangs import HangAction, HangPolicy, HangStatus, StragglerStatus
    from .job import ZeroTrainingJob
    from .lifecycle import YieldReason, YieldRequest
    from .quantity import Quantity
    from .scheduling import AttemptShape
    from .spec import ZeroTrainingJobSpec
    from .status import Condition, FailureRecord, Phase, RestartCause, ZeroTrainingJobStatus

_PLACES = {
    "hangs": ("HangAction", "HangPolicy", "HangStatus", "StragglerStatus"),
    "job": ("ZeroTrainingJob",),
    "lifecycle": ("YieldReason", "YieldRequest"),
    "quantity": ("Quantity",),
    "scheduling": ("AttemptShape",),
    "spec": ("ZeroTrainingJobSpec",),
    "status": ("Condition", "FailureRecord", "Phase", "RestartCause", "ZeroTrainingJobStatus"),
}

__all__ = [
    "AttemptShape",
    "Condition",
    "FailureRecord",
    "HangAction",
    "HangPolicy",
    "HangStatus",
    "Phase",
    "Quantity",
    "RestartCause",
    "StragglerStatus",
    "YieldReason",
    "YieldRequest",
    "ZeroTrainingJob",
    "ZeroTrainingJobSpec",
    "ZeroTrainingJobStatus",
]


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
