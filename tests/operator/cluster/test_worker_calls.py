"""Reports of many workers: an inspection keeps them all until the last one has answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.cluster.test_progress_poller import Workers
from tests.operator.reconcile_builders import running
from tests.support.dirt import texts_in
from zerotrain.contract.progress import CheckpointProgress, RejectedCheckpoint
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.operator.cluster.channel import CallKind, WorkerAddress
from zerotrain.operator.cluster.store import JobKey
from zerotrain.operator.cluster.worker_calls import WorkerCalls

pytestmark = pytest.mark.unit

LONG = "x" * 2000


class Wordy(Workers):
    """Workers that fill every text of their reports."""

    async def report(self, worker: WorkerAddress) -> WorkerReport:
        report = await super().report(worker)
        rank = replace(
            report.ranks[0],
            resumed_job=LONG,
            checkpoint=CheckpointProgress(step=1, path=LONG[:1024], time=1.0),
            rejected_checkpoints=(RejectedCheckpoint(path=LONG, reason=LONG),) * 20,
        )
        return replace(report, job=LONG, ranks=(rank,) * 64)


async def test_an_inspection_keeps_no_texts_of_the_reports() -> None:
    pods = {index: running(index) for index in range(3)}
    workers = Wordy({pod.name: 7 for pod in pods.values()})
    calls = WorkerCalls(channel=workers, key=JobKey("ml", "gpt"), uid=workers.uid, attempt=workers.attempt)
    answers = await calls.inspection_reports(pods, CallKind.INSPECT, sample_round=0)
    assert len(answers) == 3
    for answer in answers.values():
        assert isinstance(answer, WorkerReport)
        assert [rank.step for rank in answer.ranks] == [7] * 64
        assert max(len(text) for _, text in texts_in(answer)) < 20
