"""`make chaos SEED= N=`: a thousand crashes in one process, then real SIGKILLs, against a real API server.

    python -m tests.cluster.chaos --seed 1 --crashes 1000 --kills 50 --takeovers 10 --days 50

Takeovers are leaders that freeze and thaw; days are simulated. The command prints what was done and every
broken promise, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.chaos.crashes import crash, sigkill
from tests.cluster.chaos.fault_injector import Temper
from tests.cluster.chaos.frozen import freeze_and_thaw
from tests.cluster.chaos.operator_run import ignore_unraisable_errors
from tests.cluster.chaos.scenario import Scenario, collect_errors, open_scenario
from tests.operator.operator_process import install
from tests.operator.reconcile.test_days import live_through
from tests.support.devcluster import Devcluster, build_tools, existing
from zerotrain.operator.controller.start_slots import LARGE

BUILD = Path(__file__).parents[3] / "build"

WORKERS = (1, 2, 2, 3) * 4 + (LARGE + 6,)
"""Workers of the jobs, drawn at random. A large job is created in many passes, and has its own queue."""


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; the timing is never the same")
    parser.add_argument("--crashes", type=int, default=1000, help="at await points, in this process")
    parser.add_argument("--kills", type=int, default=None, help="SIGKILLs; default: a 20th of the crashes")
    parser.add_argument("--takeovers", type=int, default=None, help="default: a hundredth")
    parser.add_argument("--days", type=int, default=None, help="default: a 20th")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    kills = options.kills if options.kills is not None else options.crashes // 20
    takeovers = options.takeovers if options.takeovers is not None else options.crashes // 100
    days = options.days if options.days is not None else options.crashes // 20
    say(f"seed {seed}: {options.crashes} crashes, {kills} SIGKILLs, {takeovers} takeovers, {days} days")
    broken = live_through_days(seed, days)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        cluster = existing()
        if cluster is None:
            build_tools("control-plane")
            cluster = stack.enter_context(Devcluster().lease("control-plane"))
        kubeconfig = install(cluster, folder)
        runs: tuple[tuple[str, int, Callable[[Scenario, int], list[str]]], ...] = (
            ("crashes", options.crashes, crashes),
            ("SIGKILLs", kills, sigkills),
            ("takeovers", takeovers, freezes),
        )
        for name, count, act in runs:
            if count:
                started = time.monotonic()
                temper = Temper(workers=WORKERS)
                with open_scenario(cluster, kubeconfig, folder, seed=seed, temper=temper) as here:
                    broken += print_result(here, name, act(here, count), time.monotonic() - started)
    return 1 if broken else 0


def crashes(here: Scenario, count: int) -> list[str]:
    with collect_errors() as errors, ignore_unraisable_errors():
        record = crash(here, count, log=say)
    say(record.report())
    return [*record.problems, *errors]


def sigkills(here: Scenario, count: int) -> list[str]:
    sigkill(here, count, log=say)
    log = (here.folder / "operator.log").read_text()
    return [f"the operator's log holds a traceback:\n{log[-3000:]}"] if "Traceback" in log else []


def freezes(here: Scenario, count: int) -> list[str]:
    nths = [here.chance.randint(1, 30) for _ in range(count)]
    with collect_errors() as errors, ignore_unraisable_errors():
        places = freeze_and_thaw(here, nths)
    say("leaders froze at " + ", ".join(sorted(set(places))))
    return list(errors)


def live_through_days(seed: int, count: int) -> int:
    started, broken = time.monotonic(), 0
    for number in range(count):
        try:
            live_through(seed * 1000 + number)
        except AssertionError as error:
            broken += 1
            say(f"BROKEN: {error}")
    say(f"days: {count}, {time.monotonic() - started:.0f} s, {broken} broken")
    return broken


def print_result(here: Scenario, name: str, problems: list[str], seconds: float) -> int:
    invariants = here.check()
    complaints = [*problems, *invariants.complaints]
    did = {"ended": here.fault_injector.ended, "acts": here.fault_injector.acts, "faults": here.proxy.faults}
    did["results"] = invariants.summary()
    say(
        f"{name}: {len(invariants.jobs)} jobs, {invariants.pods} pods, {seconds:.0f} s; "
        + "; ".join(f"{what} {dict(counted)}" for what, counted in did.items())
    )
    for complaint in complaints:
        say(f"BROKEN: {complaint}")
    if complaints:
        say(f"every version of every object: {keep(here, name)}")
    return len(complaints)


def keep(here: Scenario, name: str) -> Path:
    """Store the history for the analysis of a failure, as the timing of a run cannot be repeated."""
    path = BUILD / f"chaos-{name}-{here.namespace}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lines:
        for seen in here.recorder.history():
            print(json.dumps({"change": seen.change, "kind": seen.kind, **seen.body}), file=lines)
    return path


if __name__ == "__main__":
    sys.exit(main())
