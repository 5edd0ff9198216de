"""Repeated suspend and resume: every checkpoint must be durable, in status in time, and resumed from.

    make bench-suspend                          # or: python -m tests.benchmarks.suspend_cycles --help

There are two series. With protocol doubles (the contract's HTTP, steps by the clock) several jobs take turns
on an API server without nodes; with the real engine one job of two workers trains in pods of the development
cluster. A cycle counts if the job reached Suspended, its status names a durable checkpoint of exactly the
step at which the ranks stopped, and the next attempt began at that step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.demo import operator_setup
from deploy.demo.kubectl import Kubectl
from deploy.devcluster import cluster as provider
from tests.operator.kubelet_double import KubeletDouble
from tests.operator.operator_process import KEY, install, operator
from tests.operator.worker_double import Training
from tests.support.devcluster import Cluster, Devcluster, build_tools, open_kubeconfig
from tests.support.jobs import job_json
from tests.support.kube_json import KubeJson

JOBS = "/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs"
STEPS = 10**7
CLAIM = "checkpoints"


@dataclass(kw_only=True)
class Series:
    """Results of one series."""

    name: str
    wanted: int
    durable: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds from the request to Suspended."""
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        times = sorted(self.seconds) or [0.0]
        return (
            f"{self.name}: {self.durable} of {self.wanted} suspends with a durable checkpoint; to Suspended "
            f"{statistics.median(times):.1f} s (median), {times[-1]:.1f} s (longest)"
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job that the series controls with plain requests."""

    api: KubeJson
    namespace: str
    name: str

    @property
    def path(self) -> str:
        return f"{JOBS.format(namespace=self.namespace)}/{self.name}"

    def apply(self, body: dict[str, Any]) -> None:
        self.api.post(JOBS.format(namespace=self.namespace), body)

    def status(self) -> dict[str, Any]:
        return dict(self.api.get(self.path).get("status", {}))

    def suspend(self, wanted: bool) -> None:
        self.api.patch(self.path, {"spec": {"suspend": wanted}})

    def wait(self, what: str, holds: Any, *, timeout_s: float = 300) -> dict[str, Any]:
        """Return the first status for which `holds`."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if holds(status):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: gave up waiting for {what}; status is {json.dumps(status)}")
            time.sleep(0.2)


def cycle(job: Job, series: Series, *, gain: int) -> None:
    """Train a little, suspend, check, resume, check."""
    status = job.wait("a step", lambda found: trains(found, gain))
    attempt, began = status["attempt"], time.monotonic()
    job.suspend(True)
    suspended = job.wait("Suspended", lambda found: found.get("phase") == "Suspended")
    series.seconds.append(time.monotonic() - began)
    last = suspended.get("checkpoint", {}).get("last", {})
    job.suspend(False)
    resumed = job.wait("the next attempt's first record", lambda found: resumed_from(found) is not None)
    facts = {
        "durable": last.get("durable") is True,
        "checkpoint of the last step": last.get("step") == suspended["progress"]["step"],
        "condition": condition(suspended, "CheckpointDurable") == "True",
        "one attempt more": resumed["attempt"] == attempt + 1,
        "resumed at that step": resumed_from(resumed) == last.get("step"),
        "nothing charged": suspended["restarts"]["total"] == 0,
    }
    missing = [name for name, held in facts.items() if not held]
    if missing:
        series.problems.append(f"{job.name} attempt {attempt}: not {', not '.join(missing)}")
    else:
        series.durable += 1


def trains(status: dict[str, Any], gain: int) -> bool:
    """Return whether the job is Running and past the first step of its attempt."""
    progress = status.get("progress", {})
    first = status.get("checkpoint", {}).get("resumedFromStep", 0)
    current = progress.get("attempt") == status.get("attempt")
    return status.get("phase") == "Running" and current and progress.get("step", 0) >= first + gain


def resumed_from(status: dict[str, Any]) -> int | None:
    found = status.get("checkpoint", {}).get("resumedFromStep")
    return int(found) if found is not None and status.get("phase") == "Running" else None


def condition(status: dict[str, Any], kind: str) -> str:
    return next((item["status"] for item in status["conditions"] if item["type"] == kind), "")


class CheckedKubelet(KubeletDouble):
    """A kubelet double that checks the job's status when a pod is deleted: it must contain the checkpoint."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.early: list[str] = []

    def _terminate(self, pod: Any, item: dict[str, Any]) -> None:
        training: Training = pod.training
        if pod.ended is not None and training.exit_code == 75:
            path = f"{JOBS.format(namespace=pod.namespace)}/{pod.launch.job}"
            last = self._api.get(path)["status"].get("checkpoint", {}).get("last", {})
            if last.get("step") != training.step:
                self.early.append(f"{pod.name} goes at step {training.step}, status has {last}")
        super()._terminate(pod, item)


def with_doubles(count: int, *, jobs: int) -> Series:
    series = Series(name="protocol doubles", wanted=count)
    with Devcluster().lease("control-plane") as found, found.namespace() as namespace:
        api, folder = found.api, Path(tempfile.mkdtemp(prefix="suspend-"))
        with operator(install(found, folder), folder), checked_kubelet(api, namespace) as double:
            names = [f"gpt-{number}" for number in range(jobs)]
            rounds = [count // jobs + (number < count % jobs) for number in range(jobs)]
            with ThreadPoolExecutor(jobs) as pool:
                list(
                    pool.map(lambda item: _run(api, namespace, item, series), zip(names, rounds, strict=True))
                )
            series.problems += [f"deleted early: {text}" for text in double.early]
            series.problems += [f"two attempts at once: {text}" for text in double.overlaps]
    return series


@contextmanager
def checked_kubelet(api: KubeJson, namespace: str) -> Iterator[CheckedKubelet]:
    double = CheckedKubelet(api, namespace, KEY, steps=STEPS, step_s=0.05)
    double.start()
    try:
        yield double
    finally:
        double.stop()


def _run(api: KubeJson, namespace: str, item: tuple[str, int], series: Series) -> None:
    name, rounds = item
    job = Job(api=api, namespace=namespace, name=name)
    body = job_json({"metadata.name": name, "metadata.namespace": namespace, "spec.steps": STEPS})
    body["metadata"].pop("uid")
    job.apply(body)
    for _ in range(rounds):
        try:
            cycle(job, series, gain=3)
        except TimeoutError as error:
            series.problems.append(str(error))
            return


def with_engine(count: int) -> Series:
    series = Series(name="real engine", wanted=count)
    with provider.lease("devcluster", "suspend-cycles") as found:
        operator_setup.install(Kubectl(found, operator_setup.OPERATOR_NAMESPACE))
        opened = open_kubeconfig(found.kubeconfig, found.kubectl, name=found.name)
        with opened.namespace() as namespace:
            _apply_claim(opened, namespace)
            job = Job(api=opened.api, namespace=namespace, name="gpt")
            job.apply(_real_job(namespace))
            for _ in range(count):
                try:
                    cycle(job, series, gain=2)
                except TimeoutError as error:
                    series.problems.append(str(error))
                    break
    return series


def _apply_claim(cluster: Cluster, namespace: str) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}
    cluster.apply(claim, namespace=namespace)


def _real_job(namespace: str) -> dict[str, Any]:
    return job_json(
        {
            "metadata": {"name": "gpt", "namespace": namespace},
            "spec.ranksPerWorker": 1,
            "spec.steps": STEPS,
            "spec.logEverySteps": 1,
            "spec.resources": {"cpu": "700m", "memory": "1Gi", "sharedMemory": "64Mi"},
            "spec.checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": CLAIM}}, "keepLast": 2},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.suspend_cycles", description=__doc__)
    parser.add_argument("--doubles", type=int, default=180, help="suspends with protocol doubles")
    parser.add_argument("--real", type=int, default=20, help="suspends with the real engine")
    parser.add_argument("--jobs", type=int, default=6, help="jobs that take turns in the first series")
    options = parser.parse_args()
    build_tools("control-plane")
    found = []
    if options.doubles:
        found.append(with_doubles(options.doubles, jobs=options.jobs))
    if options.real:
        found.append(with_engine(options.real))
    for series in found:
        print(series.line(), flush=True)
        for problem in series.problems:
            print(f"  {problem}", flush=True)
    return 0 if all(series.durable == series.wanted and not series.problems for series in found) else 1


if __name__ == "__main__":
    sys.exit(main())
