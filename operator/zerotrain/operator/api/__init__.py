"""The API of zerotrain: models of ZeroTrainingJob. Read by the operator, the client and the CLI."""

from .job import ZeroTrainingJob
from .quantity import Quantity
from .spec import ZeroTrainingJobSpec
from .status import Condition, Failure, Phase, RestartCause, ZeroTrainingJobStatus

__all__ = [
    "Condition",
    "Failure",
    "Phase",
    "Quantity",
    "RestartCause",
    "ZeroTrainingJob",
    "ZeroTrainingJobSpec",
    "ZeroTrainingJobStatus",
]
