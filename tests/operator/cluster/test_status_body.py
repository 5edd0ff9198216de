"""Body of a status write: nothing that is empty, and all that is read back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.reconcile_builders import job, status
from zerotrain.operator.api import ZeroTrainingJobStatus
from zerotrain.operator.cluster import json_codec
from zerotrain.operator.cluster.jobs import JobClient, status_body

pytestmark = pytest.mark.unit


class _Recorder:
    def __init__(self) -> None:
        self.body: dict[str, Any] = {}

    async def call_raw(self, request: Any) -> bytes:
        self.body = request.body
        return json_codec.write({"metadata": self.body["metadata"]})


def test_empty_lists_are_left_out_and_zeros_are_not() -> None:
    given = ZeroTrainingJobStatus.model_validate(status("Pending", shape={"workers": 2}, excludedNodes=[]))
    recorder = _Recorder()
    asyncio.run(JobClient(recorder).write_status(job(resourceVersion="7"), given))  # type: ignore[arg-type]
    written = recorder.body["status"]
    assert written["shape"]["workers"] == 2
    assert written["restarts"]["total"] == 0
    assert not {"excludedNodes", "failures", "conditions"} & set(written)
    assert not {"tolerations", "excludedNodes"} & set(written["shape"])
    assert ZeroTrainingJobStatus.model_validate(written) == given


def test_parts_that_say_nothing_yet_are_left_out() -> None:
    young = ZeroTrainingJobStatus.model_validate(
        status("Pending", shape={"workers": 2, "labels": {"a": "b"}})
    )
    body = status_body(young)
    assert body["shape"] == {"workers": 2, "labels": {"a": "b"}}
    assert not {"progress", "checkpoint"} & set(body)
    assert ZeroTrainingJobStatus.model_validate(body) == young


def test_a_step_of_zero_is_written_once_a_rank_has_reported_it() -> None:
    parsed = ZeroTrainingJobStatus.model_validate(status("Running", progress={"attempt": 1, "step": 0}))
    assert status_body(parsed)["progress"]["step"] == 0
    resumed = ZeroTrainingJobStatus.model_validate(status("Running", checkpoint={"resumedFromStep": 0}))
    assert status_body(resumed)["checkpoint"] == {"resumedFromStep": 0}
