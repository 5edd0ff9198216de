"""Table of `reconcile` for jobs with trackers: what those on the network lack is told, not refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import ALL, Row, Want, check, job, seen, status
from zerotrain.operator.api import ZeroTrainingJobSpec
from zerotrain.operator.reconcile import CreateWorkers
from zerotrain.operator.reconcile.tracker_advice import advice

pytestmark = pytest.mark.unit

NO_GANG = {"scheduling": {"gang": "None"}}


def with_tracker(name: str, **settings: Any) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 8, name: {"enabled": True, **settings}}
    return {**NO_GANG, "config": config}


ROWS = [
    Row(
        id="the first attempt tells what a tracker lacks, and starts",
        job=job(spec=with_tracker("wandb")),
        seen=seen(),
        want=Want(
            phase="Pending",
            actions=(CreateWorkers(attempt=1, indices=ALL),),
            events=("TrackerUnreachable",),
            conditions={"Admitted": ("True", "SpecAccepted"), "Stalled": ("False", "SpecAccepted")},
            messages={"event": "WANDB_API_KEY", "Admitted": "spec.network.egressCidrs"},
        ),
    ),
    Row(
        id="a later one does not",
        job=job(spec=with_tracker("wandb"), status=status("Restarting")),
        seen=seen(),
        want=Want(attempt=2, events=()),
    ),
    Row(
        id="files need nothing",
        job=job(spec=with_tracker("tensorboard")),
        seen=seen(),
        want=Want(phase="Pending", events=(), actions=(CreateWorkers(attempt=1, indices=ALL),)),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


EGRESS = {"network": {"egressCidrs": ["192.0.2.0/24"]}}
SECRET = {"podTemplate": {"envFrom": [{"secretRef": {"name": "tracker"}}]}}


def variable(name: str, value: str) -> dict[str, Any]:
    return {"podTemplate": {"env": [{"name": name, "value": value}]}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (with_tracker("comet") | EGRESS, ["COMET_API_KEY"]),
        (with_tracker("comet") | SECRET, ["egressCidrs"]),
        (with_tracker("comet") | SECRET | EGRESS, []),
        (with_tracker("comet", online=False), []),
        (with_tracker("wandb") | variable("WANDB_MODE", "offline"), []),
        (with_tracker("mlflow"), []),
        (with_tracker("mlflow", tracking_uri="https://mlflow.example"), ["egressCidrs"]),
        (with_tracker("mlflow") | variable("MLFLOW_TRACKING_URI", "http://mlflow:5000"), ["egressCidrs"]),
        (with_tracker("trackio"), []),
        (with_tracker("csv_monitor"), []),
    ],
)
def test_what_is_missing(spec: dict[str, Any], words: list[str]) -> None:
    found = advice(ZeroTrainingJobSpec.model_validate(job(spec=spec)["spec"]))
    assert [word for word in ("egressCidrs", "COMET_API_KEY", "WANDB_API_KEY") if word in found] == words
