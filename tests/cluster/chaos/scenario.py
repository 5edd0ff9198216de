"""A namespace full of jobs under injected faults: connects all parts of the harness, and checks at the end.

Used by the command (`python -m tests.cluster.chaos`) and by the tests; both add their own ways to crash.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.chaos.awaits import is_closing
from tests.cluster.chaos.fault_injector import FaultInjector, Temper, is_unread
from tests.cluster.chaos.invariants import FINISHED, Invariants
from tests.cluster.chaos.operator_run import Setup
from tests.cluster.chaos.orphans import hung_attempts, orphans
from tests.cluster.chaos.proxy import CALM, ROUGH, FaultProxy, FaultRates
from tests.cluster.chaos.watch_recorder import WatchRecorder
from tests.operator.kubelet_double import KubeletDouble, ensure_node, kubelet
from tests.operator.operator_process import KEY, write_kubeconfig
from tests.support.crd import wait_established
from tests.support.devcluster import PATIENCE_S, Cluster
from tests.support.kube_json import KubeJson

Json = dict[str, Any]

NODES = ("double", "double-b")

CRDS = Path(__file__).parents[2] / "operator" / "crds"
KINDS_OF_OTHERS = (
    "workloads.kueue.x-k8s.io",
    "resourceflavors.kueue.x-k8s.io",
    "podgroups.scheduling.x-k8s.io",
)

ENTITLED = ("is being terminated", "exceeded quota")
"""Texts of 403 answers that are not missing permissions."""

OWNED = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/secrets",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
)

OF_OTHERS = ("podgroups", "workloads")
"""Kinds of schedulers and queues, in any of their API groups that the cluster has."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The whole harness except the operator."""

    cluster: Cluster
    namespace: str
    folder: Path
    chance: random.Random
    api: KubeJson
    proxy: FaultProxy
    recorder: WatchRecorder
    double: KubeletDouble
    fault_injector: FaultInjector
    kubeconfig: Path
    """Kubeconfig with the operator's own rights, through the proxy."""

    def setup(self, identity: str = "operator-under-test") -> Setup:
        key = self.folder / "channel.key"
        key.write_bytes(KEY)
        return Setup(kubeconfig=self.kubeconfig, key_file=key, identity=identity)

    def while_(
        self, condition: Callable[[], bool], *, timeout_s: float, what: str | Callable[[], str]
    ) -> None:
        """Run the scenario for as long as the condition holds. `what` is the error's text, or returns it."""
        deadline = time.monotonic() + timeout_s
        while condition():
            self.fault_injector.tick()
            if time.monotonic() > deadline:
                text = what if isinstance(what, str) else what()
                raise TimeoutError(f"after {timeout_s:.0f} s: {text}")
            time.sleep(0.01)

    def pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.while_(lambda: time.monotonic() < end, timeout_s=seconds + PATIENCE_S, what="time does not pass")

    def finish(self, *, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Run without faults until every job has ended. An operator must be alive."""
        self.proxy.fault_rates = CALM
        self.fault_injector.pause()
        deadline = time.monotonic() + timeout_s
        while open_ := [job for job in self.fault_injector.live_jobs() if not self._rests(job)]:
            if time.monotonic() > deadline:
                status_lines = "\n".join(_status_line(job) + self._pods_of(job) for job in open_)
                raise TimeoutError(f"{len(open_)} jobs do not end:\n{status_lines}")
            self.fault_injector.attend(patience=0)
            time.sleep(0.2)
        for job in self.fault_injector.live_jobs():
            if _phase(job) in FINISHED:
                self.fault_injector.note_end(self.fault_injector.lives[job["metadata"]["uid"]], _phase(job))

    def check(self, *, settle_s: float = PATIENCE_S) -> Invariants:
        """Return all complaints about this scenario."""
        deadline = time.monotonic() + settle_s
        while (left := self._orphans()) and time.monotonic() < deadline:
            time.sleep(0.2)  # the garbage collector needs some time
        self.recorder.catch_up()
        invariants = Invariants()
        invariants.read(self.recorder.history())
        invariants.complaints += left
        invariants.complaints += [
            f"not allowed by the role: {text}"
            for text in self.proxy.forbidden
            if not any(words in text for words in ENTITLED)
        ]
        wrong = [phase for phase in self.fault_injector.ended if phase not in FINISHED]
        invariants.complaints += [f"a job ended as {phase} for no reason" for phase in wrong]
        return invariants

    def _rests(self, job: Json) -> bool:
        """Return whether a job has reached the state in which it is checked."""
        sleeps = self.fault_injector.lives[job["metadata"]["uid"]].sleeps
        if is_unread(job) or job.get("status", {}).get("protectedAttempt") is not None:
            return False  # its end is written before its budget is deleted
        return _phase(job) in (FINISHED | {"Suspended"} if sleeps else FINISHED)

    def _pods_of(self, job: Json) -> str:
        """Return what the nodes know of a job that should have ended."""
        uid = job["metadata"]["uid"]
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=zerotrain.dev/job-uid={uid}"
        pods = [f"{pod['metadata']['name']} {pod['status']}" for pod in self.api.get(path)["items"]]
        programs = [vars(training) for training in self.double.trainings() if training.job_uid == uid]
        return "\n  ".join(["", *pods, *map(str, programs[-1:])])

    def _orphans(self) -> list[str]:
        objects: list[Json] = []
        for path in (*OWNED, *_served(self.api)):
            listed = self.api.get(path.format(self.namespace))
            kind = listed["kind"].removesuffix("List")
            objects += [{"kind": kind, **item} for item in listed["items"]]
        return orphans(self.fault_injector.live_jobs(), objects, hung_attempts(self.recorder.history()))


def _served(api: KubeJson) -> list[str]:
    """Return paths of the kinds that only some clusters have."""
    found = []
    for group in api.get("/apis")["groups"]:
        for version in group["versions"]:
            root = f"/apis/{version['groupVersion']}"
            names = {item["name"] for item in api.get(root)["resources"]}
            found += [f"{root}/namespaces/{{}}/{name}" for name in OF_OTHERS if name in names]
    return found


def _status_line(job: Json) -> str:
    """Return one line about a job that should have ended."""
    status = job.get("status", {})
    text = [item for item in status.get("conditions", ()) if item["type"] in ("Reconciling", "PodsScheduled")]
    words = "; ".join(f"{item['reason']} {item['message']}" for item in text)
    what = {name: status.get(name) for name in ("phase", "attempt", "podsCreated", "yieldRequest")}
    return f"{job['metadata']['name']}: {what} {words}"


def _phase(job: Json) -> str:
    return str(job.get("status", {}).get("phase", ""))


@contextmanager
def open_scenario(
    cluster: Cluster,
    operator_kubeconfig: Path,
    folder: Path,
    *,
    seed: int,
    fault_rates: FaultRates = ROUGH,
    temper: Temper | None = None,
    steps: int = 60,
) -> Iterator[Scenario]:
    """Provide a fresh namespace of the cluster; the operator's manifests must have been applied."""
    chance, api = random.Random(seed), cluster.api
    cluster.kubectl("apply", "-f", str(CRDS))
    wait_established(cluster, *KINDS_OF_OTHERS)
    with ExitStack() as stack:
        namespace = stack.enter_context(cluster.namespace())
        double = stack.enter_context(kubelet(api, namespace, KEY, steps=steps))
        double.nodes = _nodes(api)
        proxy = FaultProxy(cluster, random.Random(chance.random()))
        stack.callback(proxy.stop)
        recorder = WatchRecorder(cluster, namespace)
        stack.callback(recorder.stop)
        proxy.fault_rates = fault_rates
        yield Scenario(
            cluster=cluster,
            namespace=namespace,
            folder=folder,
            chance=chance,
            api=api,
            proxy=proxy,
            recorder=recorder,
            double=double,
            fault_injector=FaultInjector(
                api, namespace, double, random.Random(chance.random()), temper or Temper()
            ),
            kubeconfig=through(proxy, cluster, operator_kubeconfig, folder),
        )


def _nodes(api: KubeJson) -> tuple[str, ...]:
    """Create two nodes with capacity for all jobs, so that one can be drained."""
    capacity = {"cpu": "1000", "memory": "4Ti", "pods": "1000", "ephemeral-storage": "4Ti"}
    for name in NODES:
        ensure_node(api, name)
        api.patch(f"/api/v1/nodes/{name}/status", {"status": {"allocatable": capacity, "capacity": capacity}})
        api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": False}})
    return NODES


def through(proxy: FaultProxy, cluster: Cluster, kubeconfig: Path, folder: Path) -> Path:
    """Write a kubeconfig with the same identity that goes through the proxy."""
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    path = write_kubeconfig(cluster, token, folder / "through-proxy.kubeconfig")
    config = json.loads(path.read_text())
    config["clusters"][0]["cluster"] = {"server": proxy.url}
    path.write_text(json.dumps(config))
    return path


class Errors(logging.Handler):
    """Collector of the operator's log messages at ERROR: exceptions that its code did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not is_closing.get():
            self.texts.append(self.format(record))


@contextmanager
def collect_errors() -> Iterator[list[str]]:
    """Collect the messages of this process's operator at ERROR within the block, without printing them."""
    handler, logger = Errors(), logging.getLogger("zerotrain.operator")
    logger.addHandler(handler)
    spreads, logger.propagate = logger.propagate, False
    try:
        yield handler.texts
    finally:
        logger.propagate = spreads
        logger.removeHandler(handler)
