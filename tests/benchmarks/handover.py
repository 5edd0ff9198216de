"""Seconds without a leader after the leading replica ends: lease released (SIGTERM) and crash (SIGKILL).

    python -m tests.benchmarks.handover [--times 3]

Two replicas run on their own development cluster. Measured from the signal until the other replica leads, and
until it has begun the first attempt of a job that was resumed right after the signal.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.operator.live_job import LiveJob
from tests.operator.operator_process import OperatorProcess, install
from tests.support.devcluster import Cluster, Devcluster, wait_until

LIMIT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="hand-overs of each kind")
    times = parser.parse_args().times
    with (
        Devcluster().lease("control-plane") as cluster,
        tempfile.TemporaryDirectory() as folder,
        cluster.namespace() as namespace,
    ):
        kubeconfig = install(cluster, Path(folder))
        replicas = [replica(kubeconfig, Path(folder), name) for name in ("a", "b")]
        try:
            for one in replicas:
                one.start(wait=False)
            wait_until(lambda: leading(replicas), "a leader")
            for kind, end in ENDS.items():
                found = [hand_over(cluster, namespace, replicas, end, f"{kind}-{n}") for n in range(times)]
                show(kind, found)
        finally:
            for one in replicas:
                one.kill()


def replica(kubeconfig: Path, folder: Path, name: str) -> OperatorProcess:
    own = folder / name
    own.mkdir()
    return OperatorProcess(kubeconfig, own, {"ZEROTRAIN_OPERATOR_IDENTITY": name})


ENDS: dict[str, Callable[[OperatorProcess], object]] = {
    "sigterm": OperatorProcess.terminate,
    "sigkill": OperatorProcess.kill,
}


def hand_over(
    cluster: Cluster,
    namespace: str,
    replicas: list[OperatorProcess],
    end: Callable[[OperatorProcess], object],
    name: str,
) -> tuple[float, float]:
    """Return seconds until the other replica leads, and until it has started an attempt."""
    job = LiveJob(cluster, namespace, name=name, suspend=True)
    job.wait_for("Suspended")
    leader = leading(replicas)
    (other,) = (one for one in replicas if one is not leader)
    if leader is None:
        raise RuntimeError("no replica leads")
    wait_until(lambda: "zerotrain_operator_leader 0.0" in other.get("/metrics"), "the other to stand by")
    start = time.monotonic()
    end(leader)
    job.patch('{"suspend": false}')
    wait_until(lambda: leading([other]), "the other to lead", every_s=0.05)
    led_s = time.monotonic() - start
    wait_until(lambda: job.status().get("attempt") == 1, "the job's first attempt", every_s=0.05)
    acted_s = time.monotonic() - start
    cluster.kubectl("delete", "ztj", name, "-n", namespace)
    leader.start(wait=False)
    return led_s, acted_s


def leading(replicas: list[OperatorProcess]) -> OperatorProcess | None:
    return next((one for one in replicas if "zerotrain_operator_leader 1.0" in one.get("/metrics")), None)


def show(kind: str, found: list[tuple[float, float]]) -> None:
    led, acted = ([pair[place] for pair in found] for place in (0, 1))
    print(
        f"{kind}: the other leads after {statistics.median(led):.1f} s (at most {max(led):.1f}), "
        f"has acted after {statistics.median(acted):.1f} s (at most {max(acted):.1f}, allowed {LIMIT_S:.0f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
