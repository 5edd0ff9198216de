"""Model of a ZeroTrainingJob, parsed from the API server's JSON and from job files alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from zerotrain.operator.constants import API_VERSION, KIND, MAX_JOB_NAME_LENGTH

from .base import ApiModel, rule
from .core.meta import ObjectMeta
from .scheduling import AttemptShape
from .spec import RULE_FOR_CHANGES, ZeroTrainingJobSpec
from .status import ZeroTrainingJobStatus

# A headless Service has the job's name, and a Service name must be a DNS-1035 label: no leading digit.
_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


class ZeroTrainingJob(ApiModel):
    """One training job: a number of worker pods that train one model together, restart together and resume
    from the last checkpoint."""

    RULES = (
        rule(
            f"self.metadata.name.matches('{_NAME_PATTERN}')",
            "metadata.name must consist of a-z, 0-9 and '-', start with a letter and not end with '-'",
            holds=lambda self: re.fullmatch(_NAME_PATTERN, self.metadata.name) is not None,
            loc=("metadata", "name"),
        ),
        rule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME_LENGTH}",
            f"metadata.name must be at most {MAX_JOB_NAME_LENGTH} characters: "
            "pod names append attempt and index and must fit 63",
            holds=lambda self: len(self.metadata.name) <= MAX_JOB_NAME_LENGTH,
            loc=("metadata", "name"),
        ),
        RULE_FOR_CHANGES,
    )

    api_version: Literal["zerotrain.dev/v1alpha1"] = API_VERSION
    kind: Literal["ZeroTrainingJob"] = KIND
    metadata: ObjectMeta
    spec: ZeroTrainingJobSpec
    """Desired state: what to train and with what."""

    status: ZeroTrainingJobStatus = Field(default_factory=ZeroTrainingJobStatus)
    """Observed state. Written by the operator alone."""

    @classmethod
    def parse(cls, obj: Mapping[str, Any]) -> ZeroTrainingJob:
        """Read the API server's JSON (or a job file). Raises pydantic.ValidationError with the field's
        path."""
        return cls.model_validate(obj, by_alias=True, by_name=False)

    @property
    def shape(self) -> AttemptShape:
        """Shape of the current attempt; the one that the spec asks for if no attempt was decided."""
        return self.status.shape or AttemptShape(workers=self.spec.workers)

    @property
    def world_size(self) -> int:
        """Number of ranks of the current attempt."""
        return self.shape.workers * self.spec.num_ranks_per_worker

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid
