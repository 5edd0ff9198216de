"""Objects with the product's names and labels, and jobs that take more than their share."""

from __future__ import annotations

from tests.cluster.hostile.bodies import Post, config, core, job, owner, pod
from tests.cluster.hostile.cases import Bystander, add_jobs, case
from tests.cluster.hostile.texts import DIRT, filled
from tests.support.jobs import ABSENT
from zerotrain.operator.constants import LABEL_ATTEMPT, LABEL_HELPER, LABEL_JOB, LABEL_JOB_UID, LABEL_RANK

FAT = filled(DIRT, 140_000)
"""Text of nearly the limit of all annotations, 256 KiB; with escapes more than twice that as JSON."""

UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"
PORTS = {"ports": [{"port": 80}]}
PAIR = {"spec.workers": 2}


def labels_of(name: str, uid: str, attempt: str = "1", rank: str = "0") -> dict[str, str]:
    return {LABEL_JOB: name, LABEL_JOB_UID: uid, LABEL_ATTEMPT: attempt, LABEL_RANK: rank}


add_jobs(
    [
        ("zerotrain-rendezvous-3", PAIR, {}),
        ("zerotrain-operator", PAIR, {}),
        ("bystander", PAIR, {}),
        ("many-workers", {"spec.workers": 300}, {}),
        ("elastic-hog", {
            "spec.workers": 200,
            "spec.elastic": {"minWorkers": 1, "maxWorkers": 10_000, "growAfterSeconds": 1},
            "spec.checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}},
            **config(train_batch_size=200, train_micro_batch_size_per_gpu=1),
        }, {}),
        ("gpu-hog", {"spec.workers": 50, "spec.resources": {"memory": "8Gi", "gpus": {"count": 8}}}, {}),
    ],
    alone=False,
)  # fmt: skip


@case("name-of-worker-0", alone=False)
def _name_of_worker_0(bystander: Bystander) -> list[Post]:
    return [pod("name-of-worker-0-1-0"), job("name-of-worker-0", PAIR)]


@case("names-of-objects", alone=False)
def _names_of_objects(bystander: Bystander) -> list[Post]:
    """Post every predictable name that the operator could use for this job."""
    name = "names-of-objects"
    services = [f"zerotrain-rendezvous-{number}" for number in range(16)]
    taken = [name, f"{name}-1", f"{name}-1-files", f"{name}-failures", f"{name}-1-stacks"]
    return [
        *(core("Service", each, spec=PORTS) for each in (*services, *taken)),
        *(core("ConfigMap", each, data={"x": DIRT}) for each in taken),
        *(core("Secret", each, stringData={"x": "y"}) for each in taken),
        job(name, PAIR),
        job(f"{name}-1", PAIR),
    ]


@case("forged-worker", alone=False)
def _forged_worker(bystander: Bystander) -> list[Post]:
    """Post a pod here that claims to belong to a job in another namespace."""
    labels = labels_of(bystander.name, bystander.uid)
    owners = [owner(bystander.name, bystander.uid)]
    return [
        pod(f"{bystander.name}-1-0", labels=labels, ownerReferences=owners),
        pod(f"{bystander.name}-1-1", labels=labels_of(bystander.name, bystander.uid, rank="1")),
        pod("forged-helper", labels={**labels, LABEL_HELPER: "verify"}, ownerReferences=owners),
    ]


@case("forged-numbers", alone=False)
def _forged_numbers(bystander: Bystander) -> list[Post]:
    malformed = ("-1", "x", "999999999999999999999999", "1e9", "0x1", "", "01")
    return [
        *(
            pod(f"forged-attempt-{at}", labels=labels_of("x", UNKNOWN_UID, text))
            for at, text in enumerate(malformed)
        ),
        *(
            pod(f"forged-rank-{at}", labels=labels_of("x", UNKNOWN_UID, "1", text))
            for at, text in enumerate(malformed)
        ),
        pod("forged-no-uid", labels={LABEL_JOB: "x"}),
    ]


@case("forged-fat", alone=False)
def _forged_fat(bystander: Bystander) -> list[Post]:
    """Post large pods with the label by which the operator watches pods, as every user may set it."""
    fat = {"annotations": {"x": FAT}}
    return [pod(f"forged-fat-{number}", labels=labels_of("x", UNKNOWN_UID), **fat) for number in range(30)]


@case("forged-many", alone=False)
def _forged_many(bystander: Bystander) -> list[Post]:
    return [pod(f"forged-many-{number}", labels=labels_of("x", f"u{number}")) for number in range(100)]


@case("forged-config-owner", alone=False)
def _forged_config_owner(bystander: Bystander) -> list[Post]:
    """Post objects of a job that does not exist, and of one in another namespace."""
    owners = [owner(bystander.name, bystander.uid)]
    names = (f"{bystander.name}-failures", f"{bystander.name}-1-stacks")
    return [core("ConfigMap", name, meta={"ownerReferences": owners}, data={"x": DIRT}) for name in names]


@case("map-fat", alone=False)
def _map_fat(bystander: Bystander) -> list[Post]:
    """Post 1 MB of keys, none of which is the one that the job names."""
    source = {"configMapKeyRef": {"name": "map-fat", "key": "c.json"}}
    data = {f"k{number}": "x" * 90 for number in range(9_000)}
    return [
        core("ConfigMap", "map-fat", data=data),
        job("map-fat", {"spec.config": ABSENT, "spec.configFrom": source}),
    ]


@case("map-binary", alone=False)
def _map_binary(bystander: Bystander) -> list[Post]:
    source = {"configMapKeyRef": {"name": "map-binary", "key": "c.json"}}
    return [
        core("ConfigMap", "map-binary", binaryData={"c.json": "/////w=="}),
        job("map-binary", {"spec.config": ABSENT, "spec.configFrom": source}),
    ]


@case("map-missing", alone=False)
def _map_missing(bystander: Bystander) -> list[Post]:
    source = {"configMapKeyRef": {"name": "nobody", "key": "c.json"}}
    return [job("map-missing", {"spec.config": ABSENT, "spec.configFrom": source})]


@case("many-jobs")
def _many_jobs(bystander: Bystander) -> list[Post]:
    return [job(f"many-jobs-{number}", config(**{f"x{DIRT}": number})) for number in range(60)]
