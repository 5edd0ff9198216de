"""The course of the demonstration: apply the job, watch it, kill a rank, watch it recover and complete."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML

from deploy.demo.facts import asked_for
from deploy.demo.kubectl import Kubectl, KubectlError, wait_for
from deploy.demo.logs import LossLog
from deploy.demo.report import Outcome
from deploy.demo.view import View
from deploy.devcluster.cluster import ROOT
from zerotrain.contract.worker_environment import WORKER_HTTP_PORT

EXAMPLE = ROOT / "deploy" / "examples" / "gpt.yaml"
VOLUME = ROOT / "deploy" / "examples" / "volume.yaml"
KILL_PAST_STEP = 40
FINISHED = {"Completed", "Failed", "Stalled"}
TIMEOUT_SECONDS = 900.0

# Kills one rank process, a child of the launcher, with the signal of the kernel's OOM killer.
KILL_A_RANK = """
import os, signal
def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
ranks = [pid for pid in pids if pid != os.getpid() and parent(pid) == 1]
os.kill(ranks[0], signal.SIGKILL)
print(ranks[0])
"""


@dataclass
class Story:
    """State of one run of the demonstration."""

    kubectl: Kubectl
    view: View
    log: LossLog = field(init=False)
    metrics: str = ""
    killed_at: float | None = None
    killed_after_step: int = 0

    def __post_init__(self) -> None:
        self.spec: dict[str, Any] = YAML(typ="safe", pure=True).load(EXAMPLE.read_text())
        self.log = LossLog(self.kubectl, self.name)

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    def run(self) -> Outcome:
        """Apply the job and watch it until it ends. Raises TimeoutError if it does not end in time."""
        self.kubectl.run("apply", "-f", str(VOLUME))
        self.kubectl.run("apply", "-f", str(EXAMPLE))
        self.view.print_line(f"applied {EXAMPLE.relative_to(ROOT)}: {asked_for(self.spec['spec'])}")
        wait_for("the job to end", self._tick, seconds=TIMEOUT_SECONDS, every=0.5)
        self.log.close()
        return Outcome(
            title=f"{self.name}: {self.spec['spec']['data']['path']}",
            status=self._job().get("status", {}),
            total_steps=int(self.spec["spec"]["steps"]),
            points=tuple(self.log.points),
            killed_at=self.killed_at or time.monotonic(),
            killed_after_step=self.killed_after_step,
            metrics=self.metrics,
        )

    def _job(self) -> dict[str, Any]:
        return self.kubectl.get("zerotrainingjob", self.name)

    def _tick(self) -> bool:
        job = self._job()
        pods = self.kubectl.get("pods", "--selector", f"zerotrain.dev/job={self.name}")["items"]
        self.view.show(job, pods, self.log.last_line)
        self._follow(pods)
        attempt = int(job.get("status", {}).get("attempt", 0))
        logged = self.log.of_attempt(attempt)
        if logged and logged[-1].step > KILL_PAST_STEP:
            self._read_metrics(attempt)
            if self.killed_at is None:
                self._kill(attempt, logged[-1].step)
        return job.get("status", {}).get("phase") in FINISHED

    def _follow(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            labels = pod["metadata"]["labels"]
            started = pod.get("status", {}).get("phase") in {"Running", "Succeeded", "Failed"}
            if labels.get("zerotrain.dev/rank") == "0" and started:
                self.log.follow(int(labels["zerotrain.dev/attempt"]))

    def _read_metrics(self, attempt: int) -> None:
        pod = f"{self.name}-{attempt}-0:{WORKER_HTTP_PORT}"
        path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods/{pod}/proxy/metrics"
        with suppress(KubectlError):  # the pod may just have ended; an earlier answer is kept
            # The proxy waits half a minute for a pod that has just ended; the demonstration must not.
            self.metrics = self.kubectl.run("get", "--raw", path, "--request-timeout=2s")

    def _kill(self, attempt: int, step: int) -> None:
        pod = f"{self.name}-{attempt}-1"
        self.killed_at, self.killed_after_step = time.monotonic(), step
        pid = self.kubectl.run(
            "exec", pod, "--container", "worker", "--", "python", "-c", KILL_A_RANK
        ).strip()
        self.view.print_line(f"killed rank process {pid} of pod {pod} with SIGKILL after step {step}")
