"""Double of a kubelet and its workers, for a cluster without nodes: real pods, real API server, no
containers.

Pods are bound to a node that the scheduler does not use, run as soon as they are seen, and serve the
contract's HTTP on loopback addresses of their own. All workers of one attempt share a `Training` that steps
by the clock, checkpoints, resumes and yields as the real trainer does, so that an attempt comes to its end
with or without an operator.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.operator.worker_double import Training, WorkerServer
from tests.support.devcluster import PATIENCE_S, wait_until
from tests.support.kube_json import ApiDown, KubeJson
from zerotrain.contract.exit_codes import ExitCode
from zerotrain.contract.progress import Termination
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT, LaunchSpec
from zerotrain.operator.constants import CONTAINER_NAME, LABEL_JOB, LABEL_JOB_UID, LABEL_RANK

NODE = "double"
TICK_S = 0.1
HEARTBEAT_S = 5.0
MOST_ADDRESSES = 1_000
Json = dict[str, Any]


class Pod:
    """One pod as its node knows it."""

    def __init__(self, pod: Json, training: Training, launch: LaunchSpec) -> None:
        self.name, self.namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self.uid = pod["metadata"]["uid"]
        self.training, self.launch = training, launch
        self.server: WorkerServer | None = None
        self.ready = False
        self.ended: int | None = None


class KubeletDouble:
    """Kubelet that runs all pods of jobs in one namespace until `stop()`."""

    def __init__(
        self, api: KubeJson, namespace: str, key: bytes, *, steps: int, step_s: float, every: int = 5
    ) -> None:
        self._api, self._namespace, self._key = api, namespace, key
        self._steps, self._step_s, self._every = steps, step_s, every
        self._addresses = _addresses()
        self._pods: dict[str, Pod] = {}
        self._trainings: dict[tuple[str, int], Training] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelet double", daemon=True)
        self.created: list[tuple[str, str]] = []
        """Name and UID of every pod ever seen, in order."""
        self.overlaps: list[str] = []
        """Pods that existed at the same time as a pod of another attempt of their job."""
        self.start_up = True
        """Whether new pods start; if not, they stay Pending."""
        self.may_end = threading.Event()
        """Event without which no attempt takes its last step."""
        self.may_end.set()
        self.nodes: tuple[str, ...] = (NODE,)
        """Nodes of new pods, by worker, in rotation; see `ensure_node`."""
        self.silent: set[str] = set()
        """Nodes that send no more heartbeats."""
        self.dead: set[str] = set()
        """Nodes that terminate no more pods."""
        self.off: set[str] = set()
        """Nodes whose machine has stopped: their workers neither step nor answer."""
        self._heartbeat_due = 0.0
        self.obeys_sigterm = True
        """Whether SIGTERM ends pods; if not, deleted pods stay Terminating for ever, as on a lost node."""
        ensure_node(api, NODE)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=30)
        with self._lock:
            for pod in self._pods.values():
                self._close(pod)

    def end(self, name: str, code: int, *, reason: str = "Error", exception: str | None = None) -> None:
        """End the pod's program now with this code."""
        with self._lock:
            pod = next(pod for pod in self._pods.values() if pod.name == name and pod.ended is None)
            self._end(pod, code, reason=reason, exception=exception)

    def trainings(self) -> list[Training]:
        """Return all attempts that ever ran, in order."""
        with self._lock:
            return [self._trainings[key] for key in sorted(self._trainings, key=lambda key: key[1])]

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                with self._lock:
                    self._tick()
            except ApiDown:
                continue  # the API server is down: containers run on

    def _tick(self) -> None:
        self._heartbeat()
        for training in self._trainings.values():
            training.advance()
        # Pods without a rank are no workers; another double runs them.
        path = f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={LABEL_JOB},{LABEL_RANK}"
        listed = self._api.get(path)["items"]
        self._watch_overlaps(listed)
        seen = {item["metadata"]["uid"] for item in listed}
        for uid in [uid for uid in self._pods if uid not in seen]:
            self._close(self._pods.pop(uid))
        for item in listed:
            self._sync(item)

    def _heartbeat(self) -> None:
        """Renew the nodes' heartbeats; a node without one for 40 s becomes NotReady."""
        if time.monotonic() < self._heartbeat_due:
            return
        self._heartbeat_due = time.monotonic() + HEARTBEAT_S
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        for name in set(self.nodes) - self.silent:
            self._api.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})

    def _sync(self, item: Json) -> None:
        pod = self._pods.get(item["metadata"]["uid"])
        if pod is None:
            pod = self._admit(item)
        if item["metadata"].get("deletionTimestamp"):
            self._terminate(pod, item)
            return
        if not item["spec"].get("nodeName") and not item["spec"].get("schedulingGates") and self.start_up:
            self._bind(pod, item)
        elif item["spec"].get("nodeName") in self.off:
            self._close(pod)
            pod.training.stopped_rank = pod.launch.ranks.start
        elif item["spec"].get("nodeName") and pod.server is None and pod.ended is None:
            self._start(pod)
        training = pod.training
        if pod.ended is None and pod.server is not None:
            if training.joined and not pod.ready:
                self._status(pod, ready=True)
                pod.ready = True
            if training.exit_code is not None:
                self._end(pod, training.exit_code)

    def _admit(self, item: Json) -> Pod:
        worker = next(part for part in item["spec"]["containers"] if part["name"] == CONTAINER_NAME)
        launch = LaunchSpec.from_env({entry["name"]: entry.get("value", "") for entry in worker["env"]})
        uid = item["metadata"]["labels"][LABEL_JOB_UID]
        training = self._trainings.get((uid, launch.attempt))
        if training is None:
            earlier = (found.durable for (job_uid, _), found in self._trainings.items() if job_uid == uid)
            training = Training(
                launch,
                first=max(earlier, default=0),
                total=self._steps,
                step_s=self._step_s,
                every=self._every,
                may_end=self.may_end,
            )
            self._trainings[uid, launch.attempt] = training
        pod = self._pods[item["metadata"]["uid"]] = Pod(item, training, launch)
        self.created.append((pod.name, pod.uid))
        return pod

    def _bind(self, pod: Pod, item: Json) -> None:
        away = _kept_off(item["spec"])
        place = item["spec"].get("nodeSelector", {}).get("kubernetes.io/hostname")
        nodes = [node for node in self.nodes if node not in away and place in (None, node)]
        if not nodes:
            return
        node = nodes[pod.launch.node_rank % len(nodes)]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod.name}, "target": target}
        self._api.post(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/binding", body, gone_ok=True)

    def _start(self, pod: Pod) -> None:
        pod.server = self._served(pod)
        self._status(pod)
        pod.training.join(pod.launch.node_rank)

    def _served(self, pod: Pod) -> WorkerServer:
        """Serve the pod on the next free address: other doubles on this machine draw theirs in the same
        way.
        """
        for address in itertools.islice(self._addresses, MOST_ADDRESSES):
            try:
                return WorkerServer(address, pod.training, pod.launch, self._key)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        taken = f"port {WORKER_HTTP_PORT} of {MOST_ADDRESSES} loopback addresses in a row is taken"
        raise RuntimeError(f"{taken}; end what listens on all addresses")

    def _terminate(self, pod: Pod, item: Json) -> None:
        """Act on SIGTERM: a rank with time left makes all ranks yield, as the stop flag does."""
        if not self.obeys_sigterm or item["spec"].get("nodeName") in self.dead:
            return
        grace = item["metadata"].get("deletionGracePeriodSeconds") or 0
        if pod.ended is None and pod.server is not None:
            if grace > 5 and pod.training.joined:
                pod.training.request_stop()
                pod.training.advance()
                if pod.training.exit_code is None and _before(item["metadata"]["deletionTimestamp"]):
                    return
            self._end(pod, pod.training.exit_code if pod.training.exit_code is not None else ExitCode.KILLED)
        self._close(pod)
        self._api.delete(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", pod.uid)

    def _end(self, pod: Pod, code: int, *, reason: str = "Error", exception: str | None = None) -> None:
        pod.ended = int(code)
        if code not in (ExitCode.DONE, ExitCode.YIELDED):
            pod.training.fail()
        durable = pod.training.checkpoint()
        rank = pod.launch.ranks.start if code not in (ExitCode.DONE, ExitCode.YIELDED) else None
        words = Termination(
            attempt=pod.launch.attempt,
            code=int(code),
            rank=rank,
            exception=exception,
            step=pod.training.step,
            checkpoint=durable,
        )
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        why = "Completed" if code == 0 else reason
        ended = {"exitCode": int(code), "reason": why, "finishedAt": now, "message": words.to_json()}
        self._status(pod, ended=ended)
        self._close(pod)

    def _status(self, pod: Pod, *, ready: bool = False, ended: Json | None = None) -> None:
        state = {"terminated": ended} if ended else {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        container = {"name": CONTAINER_NAME, "image": "double", "imageID": "", "restartCount": 0}
        container |= {"ready": ready, "state": state}
        phase = "Running" if ended is None else "Succeeded" if ended["exitCode"] == 0 else "Failed"
        word = "True" if ready else "False"
        conditions = [{"type": "Ready", "status": word}, {"type": "PodScheduled", "status": "True"}]
        address = pod.server.address if pod.server is not None else None
        status: Json = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
        if address is not None:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        self._api.patch(path, {"metadata": {"uid": pod.uid}, "status": status})

    def _watch_overlaps(self, listed: list[Json]) -> None:
        attempts: dict[str, set[str]] = {}
        for item in listed:
            labels = item["metadata"]["labels"]
            attempts.setdefault(labels[LABEL_JOB_UID], set()).add(labels["zerotrain.dev/attempt"])
        both = [f"{uid}: attempts {sorted(found)}" for uid, found in attempts.items() if len(found) > 1]
        self.overlaps += both

    def _close(self, pod: Pod) -> None:
        if pod.server is not None:
            pod.server.close()
            pod.server = None


def _addresses() -> Iterator[str]:
    """Yield loopback addresses of 127.100.0.1 to 127.199.255.250, from a random one on."""
    first = secrets.randbelow(100 * 256 * 250)
    for number in itertools.count(first):
        network, host = divmod(number % (100 * 256 * 250), 250)
        yield f"127.{100 + network // 256}.{network % 256}.{host + 1}"


def _kept_off(spec: Json) -> set[str]:
    """Return the nodes that the pod must not use; the operator writes the same ones in every term."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", ())
    fields = [field for term in terms for field in term.get("matchFields", ())]
    return {name for field in fields if field["operator"] == "NotIn" for name in field["values"]}


def _before(stamp: str) -> bool:
    """Return whether the time is still to come; SIGKILL follows at the end of the grace period."""
    return datetime.now(UTC) < datetime.fromisoformat(stamp)


def ensure_node(api: KubeJson, name: str) -> None:
    """Create a node object that the scheduler leaves alone; pods of unknown nodes are garbage-collected."""
    taint = {"key": "zerotrain.dev/double", "effect": "NoSchedule"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": [taint]}}
    api.post("/api/v1/nodes", node, exists_ok=True)


@contextmanager
def kubelet(
    api: KubeJson,
    namespace: str,
    key: bytes,
    *,
    steps: int = 100,
    step_s: float = 0.05,
    held: bool = False,
) -> Iterator[KubeletDouble]:
    """Run a double for the length of the block.

    With `held`, jobs go on until the test sets `may_end`, so that a slow machine has time to look at a
    running job.
    """
    double = KubeletDouble(api, namespace, key, steps=steps, step_s=step_s)
    if held:
        double.may_end.clear()
    double.start()
    try:
        yield double
    finally:
        double.stop()


def wait_for_step(double: KubeletDouble, step: int, *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the newest attempt is at least at `step`."""

    def there() -> bool:
        return any(training.step >= step for training in double.trainings()[-1:])

    wait_until(there, f"an attempt to come to step {step}", timeout_s=timeout_s, every_s=0.05)
