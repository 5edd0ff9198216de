"""The API of zerotrain: models of ZeroTrainingJob. Read by the operator, the client and the CLI."""

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
    "Phase",
    "Quantity",
    "RestartCause",
    "YieldReason",
    "YieldRequest",
    "ZeroTrainingJob",
    "ZeroTrainingJobSpec",
    "ZeroTrainingJobStatus",
]
