"""The worker pods: launch environment, resources, volumes, and what podTemplate and scheduling add."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.jobs import ABSENT, make_job
from zerotrain.contract.variables import LAUNCH_VARIABLE
from zerotrain.contract.worker_environment import LaunchSpec, unfolded
from zerotrain.operator.resources import (
    ResourceOptions,
    headless_service,
    secret_name,
    service_name,
    worker_pod,
    worker_pods,
)

pytestmark = pytest.mark.unit


OPTIONS = ResourceOptions()
Json = dict[str, Any]


def _pod(changes: Json | None = None, *, attempt: int = 1, index: int = 0) -> Json:
    return worker_pod(make_job(changes), attempt, index, OPTIONS)


def _worker(pod: Json) -> Json:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def _launch(pod: Json) -> LaunchSpec:
    return LaunchSpec.from_env({item["name"]: item.get("value", "") for item in _worker(pod)["env"]})


def _volumes(pod: Json) -> dict[str, Json]:
    """Return the volume sources by mount path of the worker container."""
    sources = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    return {mount["mountPath"]: sources[mount["name"]] for mount in _worker(pod)["volumeMounts"]}


def test_the_launcher_reads_the_environment() -> None:
    launch = _launch(_pod({"spec.nvme": {"size": "2Ti", "encryption": "AEAD"}}, attempt=3, index=1))
    assert (launch.job, launch.attempt, launch.node_rank) == ("gpt", 3, 1)
    assert (launch.world_size, launch.ranks_per_worker, list(launch.ranks)) == (4, 2, [2, 3])
    assert launch.master_addr == f"gpt-3-0.{service_name(make_job())}"
    assert str(launch.checkpoint_dir) == "/checkpoints/gpt"
    assert (str(launch.nvme_path), launch.nvme_bytes) == ("/local_nvme", 2 * 2**40)
    assert launch.nvme_encryption == "AEAD"
    assert str(launch.token_path) == "/etc/zerotrain/job/token"
    assert launch.num_gpus is None
    assert _launch(_pod({"spec.resources": {"gpus": {"count": 4}}})).num_gpus == 4


def test_every_file_of_the_environment_is_mounted() -> None:
    pod = _pod({"spec.nvme": {"size": "2Ti"}})
    launch = _launch(pod)
    mounts = tuple(_volumes(pod))
    paths = (launch.config_path, launch.train_spec_path, launch.checkpoint_dir, launch.nvme_path)
    for path in (*paths, launch.token_path, launch.run_dir):
        assert str(path).startswith(mounts)


def test_a_single_worker_needs_no_dns() -> None:
    pod = _pod({"spec.workers": 1})
    assert _launch(pod).master_addr == "127.0.0.1"
    assert "subdomain" not in pod["spec"]


def test_names_are_those_of_the_service() -> None:
    pod = _pod(attempt=2, index=1)
    assert pod["metadata"]["name"] == pod["spec"]["hostname"] == "gpt-2-1"
    labels = pod["metadata"]["labels"]
    assert (labels["zerotrain.dev/attempt"], labels["zerotrain.dev/rank"]) == ("2", "1")


@pytest.mark.parametrize("command", [ABSENT, ["python", "train.py"]])
def test_worker_0_is_behind_the_service_that_its_address_names(command: Any) -> None:
    """Worker 0 alone is behind the Service in a trainer's job, because each pod behind a Service has it
    written again.
    """
    job = make_job({"spec.command": command})
    found = headless_service(job)
    assert found is not None
    wanted = found["spec"]["selector"].items()
    first, second = worker_pods(job, 1, range(2), OPTIONS)
    assert first["spec"]["subdomain"] == second["spec"]["subdomain"] == found["metadata"]["name"]
    assert _launch(second).master_addr == f"{first['spec']['hostname']}.{first['spec']['subdomain']}"
    assert wanted <= first["metadata"]["labels"].items()
    assert (wanted <= second["metadata"]["labels"].items()) == bool(job.spec.command)


def test_many_pods_are_the_same_as_one_by_one() -> None:
    job = make_job({"spec.workers": 4})
    together = list(worker_pods(job, 1, range(4), OPTIONS))
    assert together == [worker_pod(job, 1, index, OPTIONS) for index in range(4)]
    assert len({pod["metadata"]["name"] for pod in together}) == 4


def test_the_longest_name_fits() -> None:
    pod = _pod({"metadata.name": "n" * 51, "spec.workers": 10_000}, attempt=99_999, index=9_999)
    assert len(pod["metadata"]["name"]) <= 63


def test_the_program_of_each_rank_is_the_launchers_argument() -> None:
    container = _worker(_pod({"spec.command": ["python", "a.py"], "spec.args": ["-x"]}))
    assert container["command"] == ["python", "-m", "zerotrain.runtime.launch"]
    assert container["args"] == ["--", "python", "a.py", "-x"]
    assert "args" not in _worker(_pod())


def test_requests_equal_limits() -> None:
    asked = {
        "gpus": {"count": 2},
        "cpu": "500m",
        "memory": "8Gi",
        "pinnedMemory": "4Gi",
        "sharedMemory": "2Gi",
    }
    resources = _worker(_pod({"spec.resources": asked}))["resources"]
    for part in resources.values():
        del part["ephemeral-storage"]
    assert resources["limits"] == {"cpu": "500m", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert resources["requests"] == resources["limits"]


def test_rdma_asks_for_its_devices_and_for_one_capability() -> None:
    """The worker's own container alone gets the capability, and only then."""
    asked = {"rdma": {"resourceName": "rdma/hca", "count": 2}}
    template = {"sidecars": [{"name": "log", "image": "l"}]}
    pod = _pod({"spec.resources": asked, "spec.podTemplate": template})
    worker = _worker(pod)
    assert [part["rdma/hca"] for part in worker["resources"].values()] == ["2", "2"]
    assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert worker["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["spec"]["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert _worker(_pod())["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not [variable for variable in worker["env"] if variable["name"].startswith("NCCL")]


def test_shared_memory_is_a_tmpfs_of_its_size() -> None:
    pod = _pod({"spec.resources": {"memory": "8Gi", "sharedMemory": "2Gi"}})
    assert _volumes(pod)["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert "/dev/shm" not in _volumes(_pod())


def test_nvme_with_a_class_is_a_claim_that_goes_with_the_pod() -> None:
    pod = _pod({"spec.nvme": {"size": "2Ti", "storageClassName": "fast", "mountPath": "/spill"}})
    claim = _volumes(pod)["/spill"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "2Ti"}},
    }


def test_nvme_without_a_class_is_bounded_and_asked_for() -> None:
    pod = _pod({"spec.nvme": {"size": "2Ti"}})
    assert _volumes(pod)["/local_nvme"]["emptyDir"] == {"sizeLimit": "2Ti"}
    assert _worker(pod)["resources"]["requests"]["ephemeral-storage"] == "2Ti"


@pytest.mark.parametrize(
    "source",
    [
        {"persistentVolumeClaim": {"claimName": "ckpt"}},
        {"nfs": {"server": "s", "path": "/p"}},
        {"emptyDir": {"sizeLimit": "1Gi"}},
        {
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
                }
            }
        },
    ],
    ids=lambda source: next(iter(source)),
)
def test_kinds_of_checkpoint_volume(source: Json) -> None:
    volume = _volumes(_pod({"spec.workers": 1, "spec.checkpoint.volume": source}))["/checkpoints"]
    assert volume == {"name": "zerotrain-checkpoint", **source}


def test_jobs_of_two_namespaces_share_no_folder_of_an_nfs_export() -> None:
    launch = _launch(_pod({"spec.checkpoint.volume": {"nfs": {"server": "s", "path": "/p"}}}))
    assert str(launch.checkpoint_dir) == "/checkpoints/ml/gpt"


def test_no_checkpoint_no_volume() -> None:
    pod = _pod({"spec.checkpoint": ABSENT})
    assert "/checkpoints" not in _volumes(pod)
    assert _launch(pod).checkpoint_dir is None
    assert pod["spec"]["terminationGracePeriodSeconds"] == 30


def test_the_ranks_end_before_the_kubelet_kills() -> None:
    pod = _pod({"spec.checkpoint.gracePeriodSeconds": 60})
    assert pod["spec"]["terminationGracePeriodSeconds"] == 60
    assert 0 < _launch(pod).grace_seconds < 60
    assert 0 < _launch(_pod({"spec.checkpoint.gracePeriodSeconds": 1})).grace_seconds < 1


def test_a_configuration_by_reference_is_mounted_next_to_the_train_spec() -> None:
    source = {"configMapKeyRef": {"name": "ds", "key": "c.json"}}
    pod = _pod({"spec.config": ABSENT, "spec.configFrom": source})
    ours, theirs = _volumes(pod)["/etc/zerotrain/job"]["projected"]["sources"]
    assert ours["secret"]["name"] == secret_name(make_job(), 1)
    assert [item["path"] for item in ours["secret"]["items"]] == ["token", "train.json"]
    assert theirs["configMap"] == {"name": "ds", "items": [{"key": "c.json", "path": "ds_config.json"}]}


def test_pods_are_ready_after_the_rendezvous_and_leave_a_message() -> None:
    container = _worker(_pod())
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["http"] == 8471
    assert container["terminationMessagePath"] == str(_launch(_pod()).termination_log)


def test_variables_of_the_user_replace_ours_but_not_the_launchers() -> None:
    env = [{"name": "HOME", "value": "/data"}, {"name": "A", "value": "b"}, {"name": "JOB", "value": "x"}]
    found = [(item["name"], item["value"]) for item in _worker(_pod({"spec.podTemplate.env": env}))["env"]]
    assert ("HOME", "/data") in found
    assert ("A", "b") in found
    assert [name for name, _ in found] == ["HOME", "A", "JOB", LAUNCH_VARIABLE]
    assert unfolded({**dict(found), "WORLD_SIZE": "1"})["WORLD_SIZE"] == "4"


def test_template_and_scheduling_are_merged() -> None:
    terms: Json = {"nodeSelectorTerms": [{}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists"}
    pod = _pod(
        {
            "spec.podTemplate": {
                "labels": {"team": "a"},
                "annotations": {"note": "x"},
                "envFrom": [{"secretRef": {"name": "s"}}],
                "volumes": [{"name": "data", "nfs": {"server": "s", "path": "/p"}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
                "initContainers": [{"name": "fetch", "image": "f"}],
                "sidecars": [{"name": "log", "image": "l", "securityContext": {"runAsUser": 1000}}],
                "affinity": affinity,
                "imagePullSecrets": [{"name": "reg"}],
                "runtimeClassName": "nvidia",
                "serviceAccountName": "runner",
            },
            "spec.scheduling": {
                "priorityClassName": "high",
                "nodeSelector": {"disk": "nvme"},
                "tolerations": [toleration],
            },
        }
    )
    spec = pod["spec"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["zerotrain.dev/job"] == "gpt"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert _volumes(pod)["/data"] == {"name": "data", "nfs": {"server": "s", "path": "/p"}}
    assert _worker(pod)["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert [(c["name"], c.get("restartPolicy")) for c in spec["initContainers"]] == [
        ("fetch", None),
        ("log", "Always"),
    ]
    assert spec["affinity"] == affinity
    assert spec["imagePullSecrets"] == [{"name": "reg"}]
    assert spec["runtimeClassName"] == "nvidia"
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("runner", False)
    assert (spec["priorityClassName"], spec["nodeSelector"]) == ("high", {"disk": "nvme"})
    assert spec["tolerations"] == [toleration]


def test_the_pull_policy_is_the_installers_choice() -> None:
    assert "imagePullPolicy" not in _worker(_pod())
    pod = worker_pod(make_job(), 1, 0, ResourceOptions(image_pull_policy="Never"))
    assert _worker(pod)["imagePullPolicy"] == "Never"


def test_no_volume_brings_a_token_along() -> None:
    """Users who may make jobs would get a token from the logs: the account's own, or one for other
    services.
    """
    where = "/var/run/secrets/kubernetes.io/serviceaccount"
    root = {"configMap": {"name": "kube-root-ca.crt"}}

    def template(*sources: Json) -> Json:
        return {
            "spec.podTemplate": {
                "serviceAccountName": "deployer",
                "volumes": [{"name": "t", "projected": {"sources": list(sources)}}],
                "volumeMounts": [{"name": "t", "mountPath": where}],
            }
        }

    assert "serviceAccountToken" not in json.dumps(_pod(template(root)))
    for token in ({"path": "token"}, {"path": "token", "audience": "spill store"}):
        with pytest.raises(ValidationError, match="serviceAccountToken"):
            _pod(template({"serviceAccountToken": token}, root))


def test_every_container_has_a_read_only_root_and_no_token() -> None:
    pod = _pod({"spec.nvme": {"size": "2Ti"}, "spec.podTemplate.sidecars": [{"name": "s", "image": "i"}]})
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["fsGroup"]) == (65532, 65532)
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert all(
        c["securityContext"]["readOnlyRootFilesystem"] for c in spec["containers"] + spec["initContainers"]
    )
    assert "hostPath" not in json.dumps(pod)


def test_the_token_file_is_for_the_worker_alone() -> None:
    pod = _pod()
    (secret,) = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o400
