"""Jobs that together need more than a quota or the nodes hold all complete, one after the other: on a real
scheduler with simulated nodes, without any gang.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import install, operator
from tests.support.certificates import certificate
from tests.support.devcluster import Cluster, Devcluster, wait_until
from tests.support.jobs import ABSENT
from tests.support.ports import free_port

SIBLING = "tests/operator/reconcile/test_giving_back.py::test_giving_back"
pytestmark = [pytest.mark.cluster, pytest.mark.slow(cheaper=SIBLING)]

NODES = 8
SHORT_TIMES = {
    "ZEROTRAIN_OPERATOR_CHANNEL": "silent",
    "ZEROTRAIN_OPERATOR_REFUSED_CREATION_SECONDS": "3",
    "ZEROTRAIN_OPERATOR_START_DEADLINE_SECONDS": "5",
    "ZEROTRAIN_OPERATOR_MAX_HOLD_OFF_SECONDS": "20",
}
LONG_S = 400.0
END = "devcluster.zerotrain.dev/exit-code=0"


@pytest.fixture(scope="module")
def nodes(simulated_cluster: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Cluster of simulated nodes with an operator."""
    folder = tmp_path_factory.mktemp("giving-back")
    with (
        Devcluster().lease("simulated", "--nodes", str(NODES)) as cluster,
        operator(install(cluster, folder), folder, SHORT_TIMES),
    ):
        yield cluster


@pytest.fixture
def space(nodes: Cluster) -> Iterator[str]:
    with nodes.namespace() as name:
        yield name
        nodes.kubectl("delete", "pods,ztj", "--all", "-n", name, "--grace-period=0", "--force")


def quota(cluster: Cluster, space: str, pods: int) -> None:
    item = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}}
    cluster.apply({**item, "spec": {"hard": {"pods": str(pods)}}}, namespace=space)
    wait_until(lambda: cluster.get("quota", "team", "-n", space).get("status", {}).get("used"), "the quota")


def jobs(cluster: Cluster, space: str, count: int, workers: int, **spec: Any) -> list[LiveJob]:
    small = {"cpu": "100m", "memory": "64Mi", **spec}
    return [
        LiveJob(cluster, space, f"job-{number}", workers=workers, checkpoint=ABSENT, resources=small)
        for number in range(count)
    ]


def all_complete(cluster: Cluster, space: str, teams: list[LiveJob]) -> list[dict[str, Any]]:
    """End each job's ranks with 0 once all of them have met; return the statuses at the end."""

    def done() -> bool:
        phases = {job.name: job.status().get("phase") for job in teams}
        for name, phase in phases.items():
            if phase == "Running":
                chosen = f"zerotrain.dev/job={name}"
                cluster.kubectl("annotate", "pods", "-n", space, "-l", chosen, END, "--overwrite")
        return set(phases.values()) == {"Completed"}

    wait_until(done, "the end of all jobs", timeout_s=LONG_S, every_s=0.5)
    return [job.status() for job in teams]


def check_all_complete(statuses: list[dict[str, Any]]) -> None:
    for status in statuses:
        assert status["restarts"]["total"] == 0, "giving back was charged"
        assert not status.get("failures"), status["failures"]


def test_two_jobs_of_sixty_in_a_quota_of_ninety(nodes: Cluster, space: str) -> None:
    quota(nodes, space, 90)
    check_all_complete(all_complete(nodes, space, jobs(nodes, space, 2, 60)))


def test_two_jobs_of_six_on_eight_nodes(nodes: Cluster, space: str) -> None:
    teams = jobs(nodes, space, 2, 6, gpus={"count": 8})
    check_all_complete(all_complete(nodes, space, teams))


def test_three_jobs_of_sixteen_in_a_quota_of_twenty_four_behind_a_slow_webhook(
    nodes: Cluster, space: str, tmp_path: Path
) -> None:
    quota(nodes, space, 24)
    with slow_webhook(nodes, space, tmp_path, seconds=0.4):
        check_all_complete(all_complete(nodes, space, jobs(nodes, space, 3, 16)))


@contextmanager
def slow_webhook(cluster: Cluster, space: str, folder: Path, *, seconds: float) -> Iterator[None]:
    """Run a webhook that admits every pod of the namespace after so many seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            answer = {"uid": review["request"]["uid"], "allowed": True}
            body = json.dumps(
                {"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": answer}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    cert, key = certificate(folder, "webhook", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    name = f"slow-{space}"
    hook = {
        "name": "slow.example.com",
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_port}/",
            "caBundle": b64encode(cert.read_bytes()).decode(),
        },
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    kind = "ValidatingWebhookConfiguration"
    item = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
    cluster.apply({**item, "webhooks": [hook]})
    try:
        yield
    finally:
        cluster.kubectl("delete", kind, name)
        server.shutdown()
        server.server_close()
