"""The models say the same as the API server, which `zerotrain run job.yaml` never meets.

The tables are those that tests/operator/test_crd_rejections.py applies with kubectl.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.crd_cases import ACCEPTED, REFUSED, UNKNOWN
from tests.support.jobs import job_json
from zerotrain.operator.api import ZeroTrainingJob


@pytest.mark.parametrize(
    ("name", "changes"), [(case[0], case[1]) for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_the_models_refuse_what_the_api_server_refuses(name: str, changes: dict[str, Any]) -> None:
    """A job file that `zerotrain run` reads never meets an API server."""
    job = job_json({**changes, "metadata.name": name})
    with pytest.raises(ValidationError):
        ZeroTrainingJob.parse(job)


@pytest.mark.parametrize("changes", [case[0] for case in UNKNOWN], ids=[case[1] for case in UNKNOWN])
def test_the_models_refuse_unknown_keys(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ZeroTrainingJob.parse(job_json(changes))


@pytest.mark.parametrize("changes", [case[1] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_the_models_take_what_the_api_server_takes(changes: dict[str, Any]) -> None:
    ZeroTrainingJob.parse(job_json(changes))
