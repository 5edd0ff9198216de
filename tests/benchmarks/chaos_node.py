"""Kills of every component while a job trains on the real node; the job must recover each time.

    python tests/benchmarks/chaos_node.py            # as root; about 13 minutes on 2 cores; not part of CI
    python tests/benchmarks/chaos_node.py rank-0 stopped-rank

One job per kind of damage: a rank process, a rank of worker 0, either launcher, the operator ten times in a
row, the API server for 20 seconds, a rank that is stopped (SIGSTOP) while it trains and before the ranks have
met. Every job must complete with the same loss at every step as an undisturbed job, in the expected number of
attempts, and without an extra pod. A strike that costs an attempt must be recovered from, from the kill to
the first step of the next attempt, within 20 s. A stopped rank must be found within the limit plus one check,
and be named. Its stacks are then collected; it does not react to
SIGTERM.
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
STOPPED = "stopped by a signal"
"""The launcher's name for the state of a process under SIGSTOP."""
TIMEOUT_SECONDS = 400.0
OPERATOR_KILLS = 10
MAX_RECOVERY_S = 20.0
HANG_LIMIT_S = 10
LOOK_S = 15.0
"""Seconds that detection adds to a limit (docs/operator/hangs.md)."""
MEETING_S = 90
"""Seconds within which the ranks must meet, in place of 300 s."""

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
  hangPolicy: {{minTimeoutSeconds: {hang_limit}}}
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
    at_start: bool = False
    """Whether it strikes before the ranks have met, and not after some steps."""
    reason: str = ""
    """Reason of the failure that rank 1 must report, with stacks that show it stopped.

    Empty if this is not checked.
    """
    found_within_s: float | None = None
    """Seconds from the strike until the status must report it; None if the recovery is checked."""


def pids_of(*words: str, env: str = "") -> list[int]:
    """Return processes of this machine whose command line has all words and whose environment has `env`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in command for word in words) and env.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill(pids: Iterable[int], by: signal.Signals = signal.SIGKILL) -> None:
    targets = list(pids)
    if not targets:
        raise RuntimeError("nothing to kill: the processes were not found")
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, by)


def rank_pids(job: str, rank: int) -> list[int]:
    return [
        pid
        for pid in pids_of("zerotrain.runtime.train", env=f"ZEROTRAIN_JOB={job}\0")
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    ]


def kill_rank(rank: int) -> Callable[[Kubectl, str], None]:
    return lambda _, job: kill(rank_pids(job, rank))


def stop_rank(_kubectl: Kubectl, job: str) -> None:
    """Stop rank 1 silently."""
    kill(rank_pids(job, 1), signal.SIGSTOP)


def kill_launcher(node_rank: int) -> Callable[[Kubectl, str], None]:
    return lambda _, job: kill(
        pid
        # The launcher's settings are one variable, as JSON.
        for pid in pids_of("zerotrain.runtime.launch", env=f'"ZEROTRAIN_JOB":"{job}"')
        if f'"NODE_RANK":"{node_rank}"'.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    )


def kill_operator(kubectl: Kubectl, _job: str) -> None:
    """Kill the operator with SIGKILL at random moments.

    The pod is deleted as well, which skips the kubelet's back-off.
    """
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
    Strike(
        name="stopped-rank",
        attempts=2,
        act=stop_rank,
        reason="Hang",
        found_within_s=HANG_LIMIT_S + LOOK_S,
    ),
    Strike(
        name="stopped-start",
        attempts=2,
        act=stop_rank,
        at_start=True,
        reason="RendezvousTimeout",
        found_within_s=MEETING_S + LOOK_S,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a job under its strike."""

    status: dict[str, Any]
    losses: dict[int, float]
    """Loss by step."""
    names: set[str]
    """Names of all its pods."""
    recovery_s: float | None
    """Seconds from the strike to the first step of the next attempt; None without one."""
    found_s: float | None
    """Seconds from the strike until the status reported a hang or a failure; None if it never did."""
    stacks: str = ""
    """The summary of the ranks' stacks that the operator stored."""


def run_job(kubectl: Kubectl, strike: Strike) -> Outcome:
    """Run one job under one strike."""
    log, names, done, struck_at = LossLog(kubectl, strike.name), set[str](), False, 0.0
    found_at: float | None = None
    kubectl.run("apply", "-f", "-", stdin=job_of(strike))
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
        if done and found_at is None and (status.get("hang") or status.get("failures")):
            found_at = time.monotonic()
        if not done and is_time(strike, log):
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
        found_s=found_at - struck_at if found_at is not None else None,
        stacks=kept_stacks(kubectl, status),
    )


def kept_stacks(kubectl: Kubectl, status: dict[str, Any]) -> str:
    name = next((item["stacks"] for item in status.get("failures", ()) if item.get("stacks")), None)
    return str(kubectl.get("configmap", name)["data"]["summary.txt"]) if name is not None else ""


def job_of(strike: Strike) -> str:
    return JOB.format(name=strike.name, steps=STEPS, hang_limit=HANG_LIMIT_S)


def is_time(strike: Strike, log: LossLog) -> bool:
    if strike.at_start:
        return bool(rank_pids(strike.name, 1))
    return bool(log.points) and log.points[-1].step > STRIKE_PAST_STEP


def follow(log: LossLog, pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if labels["zerotrain.dev/rank"] == "0" and pod["status"].get("phase") != "Pending":
            log.follow(int(labels["zerotrain.dev/attempt"]))


def follow_end(log: LossLog, attempt: int) -> None:
    """Read the last attempt's log once more as a whole, as a stream may have missed a part."""
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
    most_s, took_s, until = MAX_RECOVERY_S, outcome.recovery_s, "the next step"
    if strike.found_within_s is not None:
        most_s, took_s, until = strike.found_within_s, outcome.found_s, "the status reports it"
    if took_s is not None and took_s > most_s:
        found.append(f"{took_s:.1f} s until {until}, at most {most_s:.0f} are allowed")
    recorded = [(item.get("reason"), item.get("rank")) for item in status.get("failures", ())]
    if strike.reason and recorded != [(strike.reason, 1)]:
        found.append(f"failures {recorded}, expected {strike.reason} of rank 1")
    if strike.reason and STOPPED not in outcome.stacks:
        found.append(f"no kept stacks say {STOPPED!r}: {outcome.stacks[:200]!r}")
    return found


def main() -> int:
    if os.geteuid() != 0:
        print("chaos_node.py kills containers' processes from outside and needs root", file=sys.stderr)
        return 2
    failed = 0
    wanted: dict[int, float] = {}
    asked = {"undisturbed", *(sys.argv[1:] or (strike.name for strike in STRIKES))}
    if unknown := asked - {strike.name for strike in STRIKES}:
        print(f"no such strike: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    strikes = [strike for strike in STRIKES if strike.name in asked]
    with clusters.lease("devcluster", f"chaos-{os.getpid()}") as found:
        kubectl = Kubectl(found, NAMESPACE)
        operator_setup.install(kubectl)
        variable = f"ZEROTRAIN_OPERATOR_RENDEZVOUS_TIMEOUT_SECONDS={MEETING_S}"
        operator = Kubectl(found, operator_setup.OPERATOR_NAMESPACE)
        operator.run("set", "env", "deployment/zerotrain-operator", variable)
        operator.run("rollout", "status", "deployment/zerotrain-operator", "--timeout=120s")
        kubectl.run("create", "namespace", NAMESPACE)
        kubectl.run("apply", "-f", str(ROOT / "deploy" / "examples" / "volume.yaml"))
        for strike in strikes:
            started = time.monotonic()
            outcome = run_job(kubectl, strike)
            wrong = problems(strike, outcome, wanted)
            wanted = wanted or outcome.losses
            restarts = outcome.status.get("restarts", {}).get("total", 0)
            recovery = f"{outcome.recovery_s:.1f} s" if outcome.recovery_s is not None else "-"
            found_after = f"{outcome.found_s:.1f} s" if outcome.found_s is not None else "-"
            print(
                f"{strike.name:13} attempts {outcome.status.get('attempt')} restarts {restarts} "
                f"steps {len(outcome.losses)} reported after {found_after} next step after {recovery} "
                f"{time.monotonic() - started:5.0f} s  {'; '.join(wrong) or 'ok'}",
                flush=True,
            )
            failed += bool(wrong)
    print(f"{len(strikes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
