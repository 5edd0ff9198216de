"""Models of ZeroTrainingJob, the API of zerotrain. Used by the operator, the client and the CLI."""

from .hangs import HangAction, HangPolicy, HangStatus, StragglerStatus
from .job import ZeroTrainingJob
from .quantity import Quantity
from .shape import AttemptShape
from .spec import ZeroTrainingJobSpec
from .status import Condition, Failure, Phase, RestartCause, ZeroTrainingJobStatus
from .yields import YieldReason, YieldRequest

__all__ = [
    "AttemptShape",
    "Condition",
    "Failure",
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
