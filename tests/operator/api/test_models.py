"""The models agree with the API server, which `zerotrain run job.yaml` does not use.

The tables are those that tests/operator/api/test_crd_rejections.py applies with kubectl.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.crd_cases import ACCEPTED, REFUSED, UNKNOWN
from tests.support.jobs import ABSENT, job_json
from zerotrain.operator.api import ZeroTrainingJob

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("name", "changes", "path", "_text"), REFUSED, ids=[case[0] for case in REFUSED])
def test_the_models_refuse_what_the_api_server_refuses(
    name: str, changes: dict[str, Any], path: str, _text: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        ZeroTrainingJob.parse(job_json({**changes, "metadata.name": name}))
    assert _without_index(path) in {_without_index(_dotted(error["loc"])) for error in caught.value.errors()}


def test_a_rules_message_is_the_api_servers() -> None:
    with pytest.raises(ValidationError) as caught:
        ZeroTrainingJob.parse(job_json({"spec.config": ABSENT, "spec.data": ABSENT}))
    assert [(error["loc"], error["msg"]) for error in caught.value.errors()] == [
        (("spec", "config"), "exactly one of config, configFrom must be given"),
        (
            ("spec", "data"),
            "data must be given, unless command names a program of your own or finetune is given",
        ),
    ]


def _dotted(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _without_index(path: str) -> str:
    """Return the path of the list: the API server names the second of two equal names, the models the
    list.
    """
    return path.removesuffix("[1]")


@pytest.mark.parametrize("changes", [case[0] for case in UNKNOWN], ids=[case[1] for case in UNKNOWN])
def test_the_models_refuse_unknown_keys(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ZeroTrainingJob.parse(job_json(changes))


@pytest.mark.parametrize("changes", [case[1] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_the_models_take_what_the_api_server_takes(changes: dict[str, Any]) -> None:
    ZeroTrainingJob.parse(job_json(changes))
