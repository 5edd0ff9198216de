"""Fields of pods and pod groups for a gang, a topology and a queue; the attempt's shape decides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import make_job
from zerotrain.operator.api import ZeroTrainingJob
from zerotrain.operator.resources import ResourceOptions, shared_objects, worker_pod
from zerotrain.operator.resources.gang import has_group
from zerotrain.operator.resources.kueue import workload, workload_name
from zerotrain.operator.resources.pod import keep_off

pytestmark = pytest.mark.unit


Json = dict[str, Any]
KEY = b"k" * 32
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PEERS = {"zerotrain.dev/job-uid": make_job().uid, "zerotrain.dev/attempt": "3"}
"""Labels of the workers of the attempt that `shaped` describes."""


def shaped(shape: Json, changes: Json | None = None) -> ZeroTrainingJob:
    resources = {"cpu": "1500m", "memory": "1Gi"}
    status = {"attempt": 3, "shape": {"workers": 2, **shape}}
    return make_job({"spec.resources": resources, "status": status, **(changes or {})})


def pod_of(job: ZeroTrainingJob) -> Json:
    return worker_pod(job, 3, 1, ResourceOptions())


def group_of(job: ZeroTrainingJob) -> Json | None:
    objects = shared_objects(job, 3, KEY, ResourceOptions())
    return next((item for item in objects if item["kind"] == "PodGroup"), None)


HIGH = {"spec.scheduling": {"priorityClassName": "high", "topologyKey": "rack"}}
GANG = {"gang": {"minCount": 2}}
GROUPS: list[tuple[str, Json]] = [
    (
        "scheduling.k8s.io/v1alpha2",
        {
            "schedulingPolicy": GANG,
            "disruptionMode": "PodGroup",
            "priorityClassName": "high",
            "schedulingConstraints": {"topology": [{"key": "rack"}]},
        },
    ),
    (
        "scheduling.k8s.io/v1beta1",
        {
            "schedulingPolicy": GANG,
            "disruptionMode": {"all": {}},
            "priorityClassName": "high",
            "schedulingConstraints": {"topology": [{"key": "rack"}]},
        },
    ),
    (
        "scheduling.volcano.sh/v1beta1",
        {
            "minMember": 2,
            "minResources": {"cpu": "3", "memory": "2147483648"},
            "priorityClassName": "high",
        },
    ),
    (
        "scheduling.x-k8s.io/v1alpha1",
        {"minMember": 2, "minResources": {"cpu": "3", "memory": "2147483648"}},
    ),
]


@pytest.mark.parametrize(("version", "spec"), GROUPS, ids=[row[0] for row in GROUPS])
def test_one_group_an_attempt(version: str, spec: Json) -> None:
    job = shaped({"gang": version}, HIGH)
    group = group_of(job)
    assert group is not None
    assert (group["apiVersion"], group["kind"], group["spec"]) == (version, "PodGroup", spec)
    meta = group["metadata"]
    assert (meta["name"], meta["labels"]["zerotrain.dev/attempt"]) == ("gpt-3", "3")
    assert meta["ownerReferences"][0]["uid"] == job.uid
    assert has_group(version)


MEMBERS: list[tuple[str, Json, Json]] = [
    ("scheduling.k8s.io/v1alpha2", {"schedulingGroup": {"podGroupName": "gpt-3"}}, {}),
    ("scheduling.k8s.io/v1beta1", {"schedulingGroup": {"podGroupName": "gpt-3"}}, {}),
    (
        "scheduling.volcano.sh/v1beta1",
        {"schedulerName": "volcano"},
        {
            "annotations": {
                "scheduling.k8s.io/group-name": "gpt-3",
                "scheduling.volcano.sh/group-name": "gpt-3",
            }
        },
    ),
    (
        "scheduling.x-k8s.io/v1alpha1",
        {"schedulerName": "scheduler-plugins-scheduler"},
        {"labels": {"scheduling.x-k8s.io/pod-group": "gpt-3"}},
    ),
    ("", {}, {}),
]


@pytest.mark.parametrize(("version", "spec", "meta"), MEMBERS, ids=[row[0] for row in MEMBERS])
def test_pods_join_the_group_of_their_attempt(version: str, spec: Json, meta: Json) -> None:
    alone, member = pod_of(shaped({})), pod_of(shaped({"gang": version}))
    assert member["spec"] == {**alone["spec"], **spec}
    for part in ("labels", "annotations"):
        assert member["metadata"][part] == {**alone["metadata"][part], **meta.get(part, {})}


def test_no_group_without_a_gang() -> None:
    assert group_of(shaped({"gang": ""})) is None
    assert not has_group("")


def test_a_named_scheduler_stays() -> None:
    named = {"spec.scheduling": {"schedulerName": "mine"}}
    assert pod_of(shaped({"gang": "scheduling.volcano.sh/v1beta1"}, named))["spec"]["schedulerName"] == "mine"


def test_the_shape_adds_to_what_the_spec_asks_for() -> None:
    scheduling = {"nodeSelector": {"disk": "nvme"}, "tolerations": [{"key": "a", "operator": "Exists"}]}
    shape = {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "b", "operator": "Exists"}],
        "labels": {"x": "1", "zerotrain.dev/rank": "forged"},
        "annotations": {"y": "2"},
        "excludedNodes": ["n1", "n2"],
    }
    pod = pod_of(shaped(shape, {"spec.scheduling": scheduling}))
    assert pod["spec"]["nodeSelector"] == {"disk": "nvme", "pool": "gpu"}
    assert [item["key"] for item in pod["spec"]["tolerations"]] == ["a", "b"]
    assert (pod["metadata"]["labels"]["x"], pod["metadata"]["labels"]["zerotrain.dev/rank"]) == ("1", "1")
    assert pod["metadata"]["annotations"]["y"] == "2"
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert [item["values"] for item in term["matchFields"]] == [["n1"], ["n2"]]


def test_nodes_to_keep_off_hold_for_every_alternative() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"matchFields": [{"key": "x"}]}]
    spec: Json = {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}, "podAffinity": {}}}
    keep_off(spec, ["n1"])
    away = {"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}
    assert spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == [
        {**terms[0], "matchFields": [away]},
        {"matchFields": [{"key": "x"}, away]},
    ]
    assert spec["affinity"]["podAffinity"] == {}
    unchanged: Json = {}
    keep_off(unchanged, [])
    assert unchanged == {}


def test_together_and_apart_by_a_label_of_the_nodes() -> None:
    peers = {"matchLabels": PEERS}
    together = pod_of(shaped({}, {"spec.scheduling": {"topologyKey": "rack"}}))["spec"]
    assert together["affinity"]["podAffinity"][REQUIRED] == [{"topologyKey": "rack", "labelSelector": peers}]
    apart = pod_of(shaped({}, {"spec.scheduling": {"topologyKey": "rack", "topologyPolicy": "Spread"}}))[
        "spec"
    ]
    (constraint,) = apart["topologySpreadConstraints"]
    assert (constraint["maxSkew"], constraint["whenUnsatisfiable"]) == (1, "DoNotSchedule")
    assert constraint["labelSelector"] == peers
    assert constraint["nodeTaintsPolicy"] == "Honor", "a zone that is cordoned must stop nobody"
    chosen = pod_of(shaped({"nodeSelector": {"rack": "r1"}}, {"spec.scheduling": {"topologyKey": "rack"}}))
    assert "affinity" not in chosen["spec"]


def test_constraints_of_the_template_count_the_attempts_workers_unless_they_select_others() -> None:
    """Kubernetes counts no pods at all without a selector, and the constraint would have no effect."""
    zones = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    racks = {"maxSkew": 3, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}
    selector = {"matchLabels": {"app": "gpt"}}
    template = {"topologySpreadConstraints": [zones, {**racks, "labelSelector": selector}]}
    made = shaped({}, {"spec.podTemplate": template})
    spec = pod_of(made)["spec"]
    assert spec["topologySpreadConstraints"] == [
        {**zones, "labelSelector": {"matchLabels": PEERS}},
        {**racks, "labelSelector": selector},
    ]
    (pods,) = workload(made, "kueue.x-k8s.io/v1beta2", 2, pod_of(made), None)["spec"]["podSets"]
    assert pods["template"]["spec"]["topologySpreadConstraints"] == spec["topologySpreadConstraints"]


@pytest.mark.parametrize(("key", "ours"), [("rack", 1), ("zone", 0)])
def test_a_policy_adds_no_second_constraint_for_one_key(key: str, ours: int) -> None:
    """The API server refuses pods with two."""
    given = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    made = shaped(
        {},
        {
            "spec.podTemplate": {"topologySpreadConstraints": [given]},
            "spec.scheduling": {"topologyKey": key, "topologyPolicy": "Spread"},
        },
    )
    first, *others = pod_of(made)["spec"]["topologySpreadConstraints"]
    assert (first["maxSkew"], len(others)) == (2, ours)


def test_the_workload_holds_what_the_queue_counts_and_not_the_program() -> None:
    job = shaped({}, {"spec.scheduling": {"queueName": "team-a", "priorityClassName": "high"}})
    made = workload(job, "kueue.x-k8s.io/v1beta2", 5, pod_of(job), 100)
    assert made["metadata"]["name"] == workload_name(job.name, job.uid) == f"zerotrain-gpt-{job.uid[:8]}"
    assert made["spec"]["queueName"] == "team-a"
    assert (made["spec"]["priority"], made["spec"]["priorityClassRef"]["name"]) == (100, "high")
    (pods,) = made["spec"]["podSets"]
    (container,) = pods["template"]["spec"]["containers"]
    assert (pods["count"], container["resources"]["requests"]["cpu"]) == (5, "1500m")
    assert set(container) <= {"name", "image", "resources"}
    assert "volumes" not in pods["template"]["spec"]
    older = workload(job, "kueue.x-k8s.io/v1beta1", 5, pod_of(job), 100)["spec"]
    assert (older["priorityClassName"], older["priorityClassSource"]) == (
        "high",
        "scheduling.k8s.io/priorityclass",
    )


def test_kueue_s_own_topology_annotations_reach_the_workload() -> None:
    annotations = {"kueue.x-k8s.io/podset-required-topology": "rack"}
    job = shaped(
        {}, {"spec.podTemplate": {"annotations": annotations}, "spec.scheduling": {"queueName": "q"}}
    )
    (pods,) = workload(job, "kueue.x-k8s.io/v1beta2", 2, pod_of(job), None)["spec"]["podSets"]
    assert pods["topologyRequest"] == {"required": "rack", "podIndexLabel": "zerotrain.dev/rank"}
