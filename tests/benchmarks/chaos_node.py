"""Kills everything that can be killed while a job trains on the real node; the job must not mind.

    python tests/benchmarks/chaos_node.py            # as root; about 10 minutes on 2 cores; not part of CI

One job per kind of damage: a rank process, a rank of worker 0, either launcher, the operator ten times in a
row, the API server for 20 seconds. Every job must complete with the same loss at every step as a job that
nobody disturbed, in the expected number of attempts, and with no pod too many; a strike that costs an attempt
must be made up for, from the kill to the first step of the next attempt, within 20 s.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deploy.demo import operator_setup  # noqa: E402  (needs the path above)
from deploy.demo.kubectl import Kubectl, KubectlError, wait_for  # noqa: E402
from deploy.demo.logs import LossLog  # noqa: E402
from deploy.devcluster import cluster as clusters  # noqa: E402

NAMESPACE = "chaos"
STEPS = 120
STRIKE_PAST_STEP = 30
TIMEOUT_SECONDS = 400.0
OPERATOR_KILLS = 10
MAX_RECOVERY_S = 20.0

JOB = """
apiVersion: zerotrain.dev/v1alpha1
kind: ZeroTrainingJob
metadata: {{name: {name}}}
spec:
  workers: 2
  image: localhost/zerotrain:dev
  model: {{preset: gpt-1m}}
  data: {{path: "builtin:python-stdlib"}}
  steps: {steps}
  logEverySteps: 1
  resources: {{cpu: 700m, memory: 2Gi, sharedMemory: 64Mi}}
  checkpoint: {{volume: {{persistentVolumeClaim: {{claimName: checkpoints}}}}, everySteps: 20}}
  config:
    train_micro_batch_size_per_gpu: 4
    zero_optimization: {{stage: 3}}
    optimizer: {{type: AdamW, params: {{lr: 1e-3}}}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One kind of damage and the number of attempts that it costs."""

    name: str
    attempts: int
    act: Callable[[Kubectl, str], None]


def pids_of(*words: str, env: str = "") -> list[int]:
    """Processes of this machine whose command line holds all words and whose environment holds `env`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in command for word in words) and env.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill(pids: Iterable[int]) -> None:
    targets = list(pids)
    if not targets:
        raise RuntimeError("nothing to kill: the processes were not found")
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_rank(rank: int) -> Callable[[Kubectl, str], None]:
    return lambda _, job: kill(
        pid
        for pid in pids_of("zerotrain.runtime.train", env=f"ZEROTRAIN_JOB={job}\0")
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )


def kill_launcher(node_rank: int) -> Callable[[Kubectl, str], None]:
    return lambda _, job: kill(
        pid
        # The launcher is told in one variable, as JSON.
        for pid in pids_of("zerotrain.runtime.launch", env=f'"ZEROTRAIN_JOB":"{job}"')
        if f'"NODE_RANK":"{node_rank}"'.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )


def kill_operator(kubectl: Kubectl, _job: str) -> None:
    """SIGKILL at random moments; the pod is deleted as well, which skips the kubelet's back-off."""
    operator = Kubectl(kubectl.cluster, operator_setup.OPERATOR_NAMESPACE)
    chance = random.Random(0)
    for _ in range(OPERATOR_KILLS):
        wait_for("the operator's process", lambda: bool(pids_of("zerotrain.operator")), seconds=60, every=0.2)
        time.sleep(chance.uniform(0.2, 4.0))
        kill(pids_of("zerotrain.operator"))
        operator.run("delete", "pods", "--all", "--force", "--grace-period=0")


def stop_api_server(kubectl: Kubectl, _job: str) -> None:
    place = [
        "--root",
        str(clusters.INSTANCES),
        "--name",
        kubectl.cluster.name,
        "--component",
        "kube-apiserver",
    ]
    program = str(clusters.BIN / "devcluster")
    subprocess.run([program, "stop-component", "--kill", *place], check=True)
    time.sleep(20)
    subprocess.run([program, "start-component", *place], check=True)


STRIKES = (
    Strike(name="undisturbed", attempts=1, act=lambda _kubectl, _job: None),
    Strike(name="rank-1", attempts=2, act=kill_rank(1)),
    Strike(name="rank-0", attempts=2, act=kill_rank(0)),
    Strike(name="launcher-1", attempts=2, act=kill_launcher(1)),
    Strike(name="launcher-0", attempts=2, act=kill_launcher(0)),
    Strike(name="operator", attempts=1, act=kill_operator),
    Strike(name="api-server", attempts=1, act=stop_api_server),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job came through its strike."""

    status: dict[str, Any]
    losses: dict[int, float]
    """By step."""
    names: set[str]
    """Of all its pods."""
    recovery_s: float | None
    """From the strike to the first step of the next attempt; None without one."""


def run_job(kubectl: Kubectl, strike: Strike) -> Outcome:
    """One job under one strike."""
    log, names, done, struck_at = LossLog(kubectl, strike.name), set[str](), False, 0.0
    kubectl.run("apply", "-f", "-", stdin=JOB.format(name=strike.name, steps=STEPS))
    deadline = time.monotonic() + TIMEOUT_SECONDS
    status: dict[str, Any] = {}
    while status.get("phase") not in {"Completed", "Failed", "Stalled"}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {strike.name} did not end: {status}")
        time.sleep(0.3)
        with suppress(KubectlError):  # the API server may be the victim
            status = kubectl.get("zerotrainingjob", strike.name).get("status", {})
            pods = kubectl.get("pods", "--selector", f"zerotrain.dev/job={strike.name}")["items"]
            names |= {pod["metadata"]["name"] for pod in pods}
            follow(log, pods)
        if not done and log.points and log.points[-1].step > STRIKE_PAST_STEP:
            done, struck_at = True, time.monotonic()
            strike.act(kubectl, strike.name)
            log.forget()  # a stream that broke with the API server is opened again
    follow_end(log, int(status["attempt"]))
    again = [point.seen_at for point in log.points if point.attempt > 1]
    return Outcome(
        status=status,
        losses={point.step: point.loss for point in log.points},
        names=names,
        recovery_s=min(again) - struck_at if again else None,
    )


def follow(log: LossLog, pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if labels["zerotrain.dev/rank"] == "0" and pod["status"].get("phase") != "Pending":
            log.follow(int(labels["zerotrain.dev/attempt"]))


def follow_end(log: LossLog, attempt: int) -> None:
    """Read the last attempt's log once more, whole: a stream may have missed a part."""
    log.forget()
    log.follow(attempt)
    log.close()


def problems(strike: Strike, outcome: Outcome, wanted: dict[int, float]) -> list[str]:
    status, losses, names = outcome.status, outcome.losses, outcome.names
    expected = {
        f"{strike.name}-{attempt}-{index}" for attempt in range(1, strike.attempts + 1) for index in (0, 1)
    }
    found = []
    if status.get("phase") != "Completed":
        found.append(f"ended as {status.get('phase')}: {status.get('failures')}")
    if status.get("attempt") != strike.attempts:
        found.append(f"{status.get('attempt')} attempts, expected {strike.attempts}")
    if names != expected:
        found.append(f"pods {sorted(names)}, expected {sorted(expected)}")
    if missing := sorted(set(range(1, STEPS + 1)) - set(losses)):
        found.append(f"no loss for steps {missing[:5]} (of {len(missing)})")
    if different := [step for step, loss in losses.items() if wanted and wanted.get(step) != loss]:
        found.append(f"other losses than undisturbed at steps {different[:5]} (of {len(different)})")
    if outcome.recovery_s is not None and outcome.recovery_s > MAX_RECOVERY_S:
        found.append(f"{outcome.recovery_s:.1f} s to the next step, at most {MAX_RECOVERY_S:.0f} are allowed")
    return found


def main() -> int:
    if os.geteuid() != 0:
        print("chaos_node.py kills containers' processes from outside and needs root", file=sys.stderr)
        return 2
    failed = 0
    wanted: dict[int, float] = {}
    with clusters.lease("devcluster", f"chaos-{os.getpid()}") as found:
        kubectl = Kubectl(found, NAMESPACE)
        operator_setup.install(kubectl)
        kubectl.run("create", "namespace", NAMESPACE)
        kubectl.run("apply", "-f", str(ROOT / "deploy" / "examples" / "volume.yaml"))
        for strike in STRIKES:
            started = time.monotonic()
            outcome = run_job(kubectl, strike)
            wrong = problems(strike, outcome, wanted)
            wanted = wanted or outcome.losses
            restarts = outcome.status.get("restarts", {}).get("total", 0)
            recovery = f"{outcome.recovery_s:.1f} s" if outcome.recovery_s is not None else "-"
            print(
                f"{strike.name:12} attempts {outcome.status.get('attempt')} restarts {restarts} "
                f"steps {len(outcome.losses)} kill to next step {recovery} "
                f"{time.monotonic() - started:5.0f} s  {'; '.join(wrong) or 'ok'}",
                flush=True,
            )
            failed += bool(wrong)
    print(f"{len(STRIKES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
