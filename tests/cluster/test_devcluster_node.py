"""The real node: containers with limits, names, volumes, logs and exec, and nothing left on the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.devcluster import IMAGES, Cluster, Devcluster, wait_until

pytestmark = pytest.mark.node

IMAGE = "localhost/zerotrain:dev"
IS_ROOT = os.getuid() == 0


def pod(name: str, code: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that runs Python code, shaped like a worker: no root, no token, read-only root folder."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", code],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "workers"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "hostname": name,
            "subdomain": "workers",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            **spec,
        },
    }


def claim(name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


HEADLESS = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "workers"},
    "spec": {"clusterIP": "None", "selector": {"app": "workers"}, "publishNotReadyAddresses": True},
}


def await_phase(cluster: Cluster, space: str, name: str, phase: str) -> dict[str, Any]:
    def current() -> dict[str, Any] | None:
        found: dict[str, Any] = cluster.get("pod", name, "-n", space)
        return found if found["status"].get("phase") == phase else None

    result: dict[str, Any] = wait_until(current, f"pod {name} to be {phase}")
    return result


def terminated(found: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = found["status"]["containerStatuses"][0]["state"]["terminated"]
    return state


def test_logs_exit_code_and_termination_message(node_cluster: Cluster, node_namespace: str) -> None:
    code = "print('line one'); open('/dev/termination-log', 'w').write('{\"rank\": 1}'); raise SystemExit(75)"
    node_cluster.apply(pod("leaves", code), namespace=node_namespace)
    end = terminated(await_phase(node_cluster, node_namespace, "leaves", "Failed"))
    assert (end["exitCode"], end["message"]) == (75, '{"rank": 1}')
    assert node_cluster.kubectl("logs", "leaves", "-n", node_namespace).stdout == "line one\n"


def test_pods_find_each_other_by_name_and_the_host_reaches_them(
    node_cluster: Cluster, node_namespace: str
) -> None:
    serve = "import http.server as h; h.test(HandlerClass=h.SimpleHTTPRequestHandler, port=8471)"
    node_cluster.apply(
        HEADLESS,
        pod("workers-0", serve),
        pod("workers-1", "import time; time.sleep(600)"),
        namespace=node_namespace,
    )
    for name in ("workers-0", "workers-1"):
        await_phase(node_cluster, node_namespace, name, "Running")
    ask = (
        "import time, urllib.request\n"
        f"url = 'http://workers-0.workers.{node_namespace}.svc:8471/'\n"
        "for _ in range(50):\n"
        "    try: print(urllib.request.urlopen(url).status); break\n"
        "    except OSError: time.sleep(0.1)\n"
    )
    inside = node_cluster.kubectl("exec", "-n", node_namespace, "workers-1", "--", "python3", "-c", ask)
    assert inside.stdout == "200\n"
    outside = node_cluster.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{node_namespace}/pods/workers-0:8471/proxy/"
    )
    assert "Directory listing" in outside.stdout


def test_a_service_address_reaches_its_pod(node_cluster: Cluster, node_namespace: str) -> None:
    if shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
        pytest.skip("kube-proxy needs the nft program, which this machine has not")
    serve = "import http.server as h; h.test(HandlerClass=h.SimpleHTTPRequestHandler, port=8471)"
    service = {"selector": {"app": "workers"}, "ports": [{"port": 80, "targetPort": 8471}]}
    node_cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "front"}, "spec": service},
        pod("server", serve),
        namespace=node_namespace,
    )
    await_phase(node_cluster, node_namespace, "server", "Running")
    ask = (
        "import time, urllib.request\n"
        "for _ in range(50):\n"
        "    try: print(urllib.request.urlopen('http://front/').status); break\n"
        "    except OSError: time.sleep(0.1)\n"
    )
    client = pod("client", ask)
    client["metadata"]["labels"] = {"app": "client"}
    node_cluster.apply(client, namespace=node_namespace)
    await_phase(node_cluster, node_namespace, "client", "Succeeded")
    assert node_cluster.kubectl("logs", "client", "-n", node_namespace).stdout == "200\n"


@pytest.mark.skipif(not IS_ROOT, reason="limits need control groups, and those need root")
def test_limits_hold(node_cluster: Cluster, node_namespace: str) -> None:
    hungry = "x = bytearray(500 << 20)"
    limits = {"resources": {"limits": {"memory": "64Mi", "cpu": "500m"}}}
    node_cluster.apply(pod("hungry", hungry, container=limits), namespace=node_namespace)
    end = terminated(await_phase(node_cluster, node_namespace, "hungry", "Failed"))
    assert (end["exitCode"], end["reason"]) == (137, "OOMKilled")


def test_volumes_are_shared_writable_and_come_back_empty(node_cluster: Cluster, node_namespace: str) -> None:
    def with_volume(name: str, code: str) -> dict[str, Any]:
        mounts = [{"name": "data", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}]
        volumes = [
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        ]
        return pod(name, code, container={"volumeMounts": mounts}, volumes=volumes)

    write = "open('/data/from-one', 'w').write('x'); open('/dev/shm/x', 'w')"
    read = "import os; print(os.listdir('/data'))"
    node_cluster.apply(claim("data"), with_volume("one", write), namespace=node_namespace)
    await_phase(node_cluster, node_namespace, "one", "Succeeded")
    node_cluster.apply(with_volume("two", read), namespace=node_namespace)
    await_phase(node_cluster, node_namespace, "two", "Succeeded")
    assert node_cluster.kubectl("logs", "two", "-n", node_namespace).stdout == "['from-one']\n"

    used = node_cluster.get("pvc", "data", "-n", node_namespace)["spec"]["volumeName"]
    node_cluster.kubectl("delete", "pod", "one", "two", "-n", node_namespace)
    node_cluster.kubectl("delete", "pvc", "data", "-n", node_namespace)
    again = claim("data")
    again["spec"]["volumeName"] = used
    wait_until(
        lambda: (
            node_cluster.kubectl("get", "pv", used, "-o", "jsonpath={.status.phase}", check=False).stdout
            == "Available"
        ),
        f"volume {used} to be offered again",
    )
    node_cluster.apply(again, with_volume("three", read), namespace=node_namespace)
    await_phase(node_cluster, node_namespace, "three", "Succeeded")
    assert node_cluster.kubectl("logs", "three", "-n", node_namespace).stdout == "[]\n"


def test_a_pod_reaches_the_api_with_its_service_account(node_cluster: Cluster, node_namespace: str) -> None:
    node_cluster.kubectl("create", "rolebinding", "reader", "-n", node_namespace, "--clusterrole=view",
                         f"--serviceaccount={node_namespace}:default")  # fmt: skip
    code = (
        "import ssl, json, urllib.request\n"
        "folder = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "context = ssl.create_default_context(cafile=folder + 'ca.crt')\n"
        f"url = 'https://kubernetes.default.svc/api/v1/namespaces/{node_namespace}/pods'\n"
        "headers = {'Authorization': 'Bearer ' + open(folder + 'token').read()}\n"
        "request = urllib.request.Request(url, headers=headers)\n"
        "print(len(json.load(urllib.request.urlopen(request, context=context))['items']))\n"
    )
    node_cluster.apply(pod("asks", code, automountServiceAccountToken=True), namespace=node_namespace)
    await_phase(node_cluster, node_namespace, "asks", "Succeeded")
    assert node_cluster.kubectl("logs", "asks", "-n", node_namespace).stdout == "1\n"


def machine_state() -> set[tuple[str, str]]:
    """Return what a node could leave behind: mounts, links, control groups, kernel settings."""
    settings = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
    folders = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/pods")
    return {
        *(("mount", line.split(" ", 4)[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        *(("link", link["ifname"]) for link in links),
        *((name, (Path("/proc/sys") / name).read_text()) for name in settings),
        *(("folder", path) for path in folders if Path(path).exists()),
    }


def cgroups_of(name: str) -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/devcluster-{name}-*")] + [
        str(path) for path in Path("/sys/fs/cgroup").glob(f"devcluster-{name}-*")
    ]


@pytest.mark.parametrize("how", ["down", "kill"])
def test_nothing_is_left_on_the_machine(node_tools: None, tmp_path: Path, how: str) -> None:
    before = machine_state()
    here = Devcluster(root=tmp_path)
    with here.lease("node") as cluster, cluster.namespace() as space:
        # The pause image is in every node, and small.
        simple = {"name": "main", "image": "localhost/pause:1", "imagePullPolicy": "Never"}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "small"},
                "spec": {"containers": [simple]},
            },
            namespace=space,
        )
        await_phase(cluster, space, "small", "Running")
        name = cluster.name
        assert bool(cgroups_of(name)) == IS_ROOT
        if how == "kill":
            (supervisor,) = [
                int(entry.name)
                for entry in Path("/proc").iterdir()
                if entry.name.isdigit() and is_outside_supervisor(entry, name)
            ]
            os.kill(supervisor, 9)
    assert cgroups_of(name) == []
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any_process_mentions(str(tmp_path)), "the last process to go")
    # Other programs of the machine come and go as well; remains of a node stay.
    wait_until(lambda: not (machine_state() - before), "nothing to be on the machine that was not there")


def command_of(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_outside_supervisor(entry: Path, name: str) -> bool:
    command = command_of(entry)
    return "supervise" in command and "--inside" not in command and name in command


def any_process_mentions(text: str) -> bool:
    return any(
        text in " ".join(command_of(entry))
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid()
    )


def test_an_image_can_be_loaded_later(devcluster: Devcluster, node_cluster: Cluster) -> None:
    if not node_cluster.name:
        pytest.skip("the cluster of ZEROTRAIN_TEST_KUBECONFIG is not ours to load images into")
    pause = IMAGES / "pause.tar"
    subprocess.run(devcluster.command("load-image", str(pause), name=node_cluster.name), check=True)
    missing = subprocess.run(
        devcluster.command("load-image", "/nonexistent.tar", name=node_cluster.name),
        check=False,
        capture_output=True,
        text=True,
    )
    assert missing.returncode == 1
    assert "/nonexistent.tar" in missing.stderr
