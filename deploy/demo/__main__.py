"""`python -m deploy.demo`: cluster, operator, training, kill, recovery, report.

The exit status is 0 only if every expectation held.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import NoReturn

from rich.console import Console

from deploy.demo import operator_setup, report
from deploy.demo.kubectl import Kubectl, KubectlError
from deploy.demo.story import Story
from deploy.demo.view import View
from deploy.devcluster import cluster
from deploy.devcluster.cluster import ROOT, Cluster
from zerotrain.operator.constants import LABEL_JOB

NAMESPACE = "demo"
CURVE = ROOT / "build" / "demo" / "loss.png"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    parser.add_argument("--cluster", default="devcluster", choices=["devcluster", "kind"])
    parser.add_argument("--name", default=f"demo-{os.getpid()}", help="name of the cluster's instance")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running at the end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)  # stops the cluster, as on Ctrl-C
    console = Console(soft_wrap=True)
    try:
        with cluster.lease(options.cluster, options.name, keep=options.keep) as found:
            return run(console, found)
    except (cluster.ClusterError, KubectlError, TimeoutError) as error:
        console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130


def run(console: Console, found: Cluster) -> int:
    """Run the demonstration on a running cluster."""
    kubectl = Kubectl(found, NAMESPACE)
    with View(console) as view:
        view.print_line(f"cluster {found.name} is up; KUBECONFIG={found.kubeconfig}")
        try:
            operator_setup.install(kubectl)
            view.print_line(f"the operator runs in namespace {operator_setup.OPERATOR_NAMESPACE}")
            # On an existing cluster, the job and checkpoints of an earlier run would otherwise be resumed.
            kubectl.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=180s")
            kubectl.run("apply", "-f", "-", stdin=_namespace())
            outcome = Story(kubectl, view).run()
        except (TimeoutError, KubectlError):
            _diagnose(console, kubectl)
            raise
    report.print_report(console, outcome)
    report.save_curve(outcome.points, CURVE, title=outcome.title)
    console.print(f"loss curve: {CURVE.relative_to(ROOT)}")
    failed = report.problems(outcome)
    for problem in failed:
        console.print(f"did not hold: {problem}", style="red", markup=False)
    if failed:
        _diagnose(console, kubectl)
        return 1
    console.print("demo passed: the job lost a rank, went on from its last checkpoint and completed")
    return 0


def _namespace() -> str:
    """Return the job's namespace, which enforces the strictest pod security level."""
    return (
        f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
        "  labels: {pod-security.kubernetes.io/enforce: restricted}\n"
    )


def _diagnose(console: Console, kubectl: Kubectl) -> None:
    """Print the objects and logs to look at first after a failure."""
    operator = Kubectl(kubectl.cluster, operator_setup.OPERATOR_NAMESPACE)
    looks = [
        (kubectl, ("describe", "zerotrainingjobs")),
        (kubectl, ("get", "pods,events", "-o", "wide")),
        (kubectl, ("logs", "--selector", LABEL_JOB, "--all-containers", "--tail=40", "--prefix")),
        (operator, ("get", "pods", "-o", "wide")),
        (operator, ("logs", "deployment/zerotrain-operator", "--tail=60")),
    ]
    for where, args in looks:
        console.rule(f"kubectl -n {where.namespace} {' '.join(args)}")
        subprocess.run(where.command(*args), env=where.environ(), check=False)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
