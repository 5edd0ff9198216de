"""`python -m deploy.monitoring up|check|status|down`: Prometheus and Alertmanager beside a cluster."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from deploy.dashboards.boards import BOARDS
from deploy.dashboards.model import Dashboard
from deploy.devcluster.cluster import INSTANCES, ROOT, ClusterError
from deploy.monitoring import stack
from deploy.monitoring.access import AccessError
from deploy.monitoring.client import PrometheusClient, QueryError, firing
from deploy.monitoring.config import OPERATOR
from deploy.monitoring.panels import FILLED_BY_ANY_JOB, View, answers

FOLDERS = Path(os.environ.get("ZEROTRAIN_MONITORING_FOLDER") or ROOT / "build" / "monitoring").resolve()
"""Parent of one folder per instance name. Another parent keeps instances of the same name apart."""


def main() -> int:
    options = _parser().parse_args()
    folder = FOLDERS / options.name
    try:
        return {"up": _up, "down": _down, "status": _status, "check": _check}[options.verb](folder, options)
    except (AccessError, ClusterError, QueryError, stack.StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.monitoring", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    texts = {
        "up": "start both for a cluster",
        "check": "run every dashboard's queries for one job, and print which panels have data",
        "status": "addresses, targets and firing alerts",
        "down": "end both",
    }
    for verb, text in texts.items():
        sub = verbs.add_parser(verb, help=text, description=text)
        sub.add_argument("--name", default="dev", help="of the development cluster, and of this instance")
        if verb == "up":
            sub.add_argument("--kubeconfig", type=Path, help="another cluster; $KUBECONFIG counts too")
            sub.add_argument("--interval", type=int, default=5, help="seconds between two scrapes")
            sub.add_argument("--test-alert", action="store_true", help="an alert for every job that trains")
        if verb in {"check", "status"}:
            sub.add_argument("--wait", type=float, default=0.0, help="seconds to wait until it is so")
        if verb == "status":
            sub.add_argument("--alert", action="append", default=[], help="fail unless this one fires")
        if verb == "check":
            sub.add_argument("--namespace", default="default")
            sub.add_argument("--job", required=True)
            sub.add_argument("--minutes", type=float, default=15.0, help="how far to look back")
    return parser


def _up(folder: Path, options: argparse.Namespace) -> int:
    own = INSTANCES / options.name / "kubeconfig"
    given = options.kubeconfig or (Path(os.environ["KUBECONFIG"]) if "KUBECONFIG" in os.environ else own)
    if not given.is_file():
        print(
            f"error: there is no {given}; start a cluster with `make cluster-up NAME={options.name}`, or "
            "give one with --kubeconfig",
            file=sys.stderr,
        )
        return 1
    settings = stack.Settings(kubeconfig=given, interval_s=options.interval, test_alert=options.test_alert)
    started = stack.start(folder, settings)
    print(f"Prometheus:   {started.prometheus}")
    print(f"Alertmanager: {started.alertmanager}")
    print(f"python -m deploy.monitoring check --name {options.name} --namespace NAMESPACE --job JOB")
    return 0


def _down(folder: Path, options: argparse.Namespace) -> int:
    print("ended" if stack.stop(folder) else f"nothing runs under the name {options.name}")
    return 0


def _status(folder: Path, options: argparse.Namespace) -> int:
    running = _running(folder, options)
    deadline = time.monotonic() + options.wait
    while not (seen := _names(firing(running.alertmanager))) >= set(options.alert):
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    print(f"Prometheus:   {running.prometheus}\nAlertmanager: {running.alertmanager}")
    for target in PrometheusClient(running.prometheus).targets():
        labels = target["labels"]
        where = f"{labels.get('namespace')}/{labels.get('pod')}"
        error = target.get("lastError", "")
        print(f"target  {target['health']:<7} {labels['job']:<20} {where} {error}".rstrip())
    for alert in firing(running.alertmanager):
        labels = alert["labels"]
        where = f"{labels.get('namespace', '')}/{labels.get('job_name', '')}"
        print(f"alert   {labels.get('severity', ''):<8} {labels['alertname']} {where}")
    for name in sorted(set(options.alert) - seen):
        print(f"error: {name} does not fire", file=sys.stderr)
    return 0 if seen >= set(options.alert) else 1


def _names(alerts: list[Any]) -> set[str]:
    return {alert["labels"]["alertname"] for alert in alerts}


def _check(folder: Path, options: argparse.Namespace) -> int:
    client = PrometheusClient(_running(folder, options).prometheus)
    deadline = time.monotonic() + options.wait
    found: dict[str, dict[str, bool]] = {}
    while True:
        now = time.time()
        variables = {"namespace": options.namespace, "job": options.job, "rank": ".*", "operator": OPERATOR}
        view = View(variables=variables, start=now - 60 * options.minutes, end=now)
        before, found = found, {board.name: _panels_with_data(client, board, view) for board in BOARDS}
        missing = [
            f"{board}: {panel}"
            for board, panels in FILLED_BY_ANY_JOB.items()
            for panel in sorted(panels)
            if not found[board][panel]
        ]
        settled = found == before  # a rate has no value before its second sample
        if (settled and not missing) or time.monotonic() > deadline:
            break
        time.sleep(2)
    for board, panels in found.items():
        empty = [panel for panel, has_data in panels.items() if not has_data]
        print(f"{board:<14} {len(panels) - len(empty):>3} of {len(panels)} panels have data")
        for panel in empty:
            print(f"{'':<14}     none: {panel}")
    for line in missing:
        print(f"error: no data for {line}, which every job that makes steps has", file=sys.stderr)
    return 1 if missing else 0


def _panels_with_data(client: PrometheusClient, board: Dashboard, view: View) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for answer in answers(client, board, view):
        found[answer.panel] = found.get(answer.panel, False) or answer.num_series > 0
    return found


def _running(folder: Path, options: argparse.Namespace) -> stack.Stack:
    running = stack.load(folder)
    if running is None:
        raise stack.StackError(
            f"nothing runs under the name {options.name}; start it with "
            f"`python -m deploy.monitoring up --name {options.name}`"
        )
    return running


if __name__ == "__main__":
    sys.exit(main())
