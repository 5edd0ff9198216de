"""Inputs of Kueue's Workload: their hash tells other pods from the same ones, and survives the way to the API
server and back.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.crd_spreads import SPREAD
from tests.support.jobs import make_job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.cluster.workload_status import queue_view
from zerotrain.operator.constants import ANNOTATION_MADE_FROM
from zerotrain.operator.resources import ResourceOptions, worker_pod
from zerotrain.operator.resources.kueue import made_from, workload

pytestmark = pytest.mark.unit


Json = dict[str, Any]
IN_QUEUE = {"spec.scheduling.queueName": "team-a"}
SIDECAR = {"name": "log", "image": "log:1", "resources": {"requests": {"cpu": "1"}}}
LARGER = {**SIDECAR, "resources": {"requests": {"cpu": "2"}}}


def in_queue(changes: Json) -> ZeroTrainingJob:
    return make_job({**IN_QUEUE, **changes})


def made_for(job: ZeroTrainingJob) -> Json:
    return workload(job, "kueue.x-k8s.io/v1beta2", 2, worker_pod(job, 1, 0, ResourceOptions()), None)


OTHER_PODS: list[tuple[Json, Json]] = [
    ({}, {"spec.scheduling.nodeSelector": {"pool": "b"}}),
    ({}, {"spec.scheduling.tolerations": [{"key": "gpu", "operator": "Exists"}]}),
    ({}, {"spec.scheduling.schedulerName": "mine"}),
    ({}, {"spec.scheduling.topologyKey": "rack"}),
    ({}, {"spec.podTemplate": {"sidecars": [SIDECAR]}}),
    ({"spec.podTemplate": {"sidecars": [SIDECAR]}}, {"spec.podTemplate": {"sidecars": [LARGER]}}),
    ({"spec.podTemplate": {"sidecars": [SIDECAR]}}, {"spec.podTemplate": {"initContainers": [SIDECAR]}}),
    ({}, {"spec.podTemplate": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}}),
    ({}, {"spec.podTemplate": {"affinity": {"nodeAffinity": {}}}}),
    ({}, {"spec.podTemplate": {"runtimeClassName": "nvidia"}}),
    ({}, {"spec.podTemplate": {"topologySpreadConstraints": [SPREAD]}}),
    ({}, {"spec.image": "localhost/zerotrain:new"}),
    ({}, {"spec.resources": {"cpu": "3"}}),
    ({}, {"spec.nvme": {"mountPath": "/nvme", "size": "1Gi"}}),
]
"""Changes of a job that give other pods in the rendered Workload, which is the reference."""


@pytest.mark.parametrize(("before", "after"), OTHER_PODS, ids=[str(row[1]) for row in OTHER_PODS])
def test_other_pods_have_another_hash(before: Json, after: Json) -> None:
    old, new = in_queue(before), in_queue(after)
    assert made_for(old)["spec"]["podSets"] != made_for(new)["spec"]["podSets"], "no case of other pods"
    assert made_from(old.spec) != made_from(new.spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.steps": 7},
        {"spec.workers": 1},
        {"spec.suspend": True},
        {"spec.scheduling.priorityClassName": "high"},
        {"spec.checkpoint.gracePeriodSeconds": 90},
        {"spec.config.optimizer": {"type": "AdamW"}},
        {"spec.podTemplate": {}},
        {"status.attempt": 4, "status.shape": {"workers": 2, "nodeSelector": {"pool": "gpu"}}},
    ],
    ids=str,
)
def test_what_is_compared_by_itself_or_is_no_part_of_the_pods_keeps_the_place(changes: Json) -> None:
    assert made_from(in_queue(changes).spec) == made_from(in_queue({}).spec)


def test_the_queue_s_view_has_the_hash_of_the_workload() -> None:
    job = in_queue({"spec.scheduling.nodeSelector": {"pool": "b"}})
    made = made_for(job)
    assert made["metadata"]["annotations"] == {ANNOTATION_MADE_FROM: made_from(job.spec)}
    assert queue_view(made, []).made_from == made_from(job.spec)
    del made["metadata"]["annotations"]
    assert queue_view(made, []).made_from == ""


def test_the_hash_of_a_spec_is_that_of_earlier_versions() -> None:
    """A Workload from before an upgrade must not lose its admission by it."""
    job = in_queue(
        {"spec.scheduling.nodeSelector": {"pool": "b"}, "spec.podTemplate": {"sidecars": [SIDECAR]}}
    )
    assert made_from(job.spec) == "fe46fc17c8d9c444"
