"""`make chaos SEED= N=`: a thousand crashes in one process, then real SIGKILLs, against a real API server.

    python -m tests.cluster.chaos --seed 1 --crashes 1000 --kills 50

Prints what was done and every promise that was broken; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.chaos.crashes import crash, sigkill
from tests.cluster.chaos.incarnation import unheard_deaths
from tests.cluster.chaos.season import Season, heard_errors, season
from tests.operator.operator_process import install
from tests.support.devcluster import Devcluster, build_tools, existing


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; the timing is never the same")
    parser.add_argument("--crashes", type=int, default=1000, help="in this process")
    parser.add_argument("--kills", type=int, default=None, help="SIGKILLs; default: a 20th of the crashes")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    kills = options.kills if options.kills is not None else options.crashes // 20
    say(f"seed {seed}: {options.crashes} crashes, {kills} SIGKILLs")
    broken = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        cluster = existing()
        if cluster is None:
            build_tools("control-plane")
            cluster = stack.enter_context(Devcluster().lease("control-plane"))
        kubeconfig = install(cluster, folder)
        runs: tuple[tuple[str, int, Callable[[Season, int], list[str]]], ...] = (
            ("crashes", options.crashes, crashes),
            ("SIGKILLs", kills, sigkills),
        )
        for name, count, act in runs:
            if count:
                started = time.monotonic()
                with season(cluster, kubeconfig, folder, seed=seed) as here:
                    broken += tell(here, name, act(here, count), time.monotonic() - started)
    return 1 if broken else 0


def crashes(here: Season, count: int) -> list[str]:
    with heard_errors() as errors, unheard_deaths():
        record = crash(here, count, told=say)
    say(record.report())
    return [*record.problems, *errors]


def sigkills(here: Season, count: int) -> list[str]:
    sigkill(here, count, told=say)
    log = (here.folder / "operator.log").read_text()
    return [f"the operator's log holds a traceback:\n{log[-3000:]}"] if "Traceback" in log else []


def tell(here: Season, name: str, problems: list[str], seconds: float) -> int:
    promises = here.judge()
    complaints = [*problems, *promises.complaints]
    say(
        f"{name}: {len(promises.jobs)} jobs, {promises.pods} pods, {seconds:.0f} s; "
        f"ended {dict(here.gremlin.ended)}; acts {dict(here.gremlin.acts)}; faults {dict(here.proxy.faults)}"
    )
    for complaint in complaints:
        say(f"BROKEN: {complaint}")
    return len(complaints)


if __name__ == "__main__":
    sys.exit(main())
