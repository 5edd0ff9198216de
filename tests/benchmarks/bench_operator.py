"""The operator's speed and scale beside plain batch/v1 Jobs and a bare creator, on simulated nodes.

    make bench-operator                        # or: python -m tests.benchmarks.bench_operator --help

Every contender creates the same numbers of pods in the same cluster, in turn, every other round backwards (A
B C C B A ...), as the state of the cluster after one contender affects the next. A time is judged as the
median over the rounds of its ratio to the plain Jobs of the same round. Further ratios compare with Jobs
whose pods have the content of ours, with all of our objects created without an operator, and with the pods
alone. They divide the time between the operator, the objects and the pods. Processor time is that of the
cluster's processes, the operator and this benchmark, from the first creation until shortly after the last pod
ran. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.benchmarks import bench_operator_scale as scale
from tests.benchmarks.bench_operator_belongings import Belongings
from tests.benchmarks.bench_operator_cluster import Meter, open_api
from tests.benchmarks.bench_operator_loads import (
    Bench,
    Run,
    RunningWatch,
    Size,
    collection,
    zerotrain_job,
)
from tests.operator.operator_process import OperatorProcess, install, operator
from tests.support.devcluster import Devcluster, build_tools

ZEROTRAIN, PLAIN = "zerotrain", "plain Jobs"
SAME, OBJECTS, SAME_BARE, BARE = "Jobs of our pods", "our objects, bare", "our pods, bare", "bare pods"
OTHERS = (PLAIN, SAME, OBJECTS, SAME_BARE, BARE)
MIB = 1 << 20
GROUPS = ("small", "large", "wide", "restart", "kill", "idle", "polling", "many")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurements; `quick` only checks that everything works."""

    small: Size
    large: Size
    wide: Size
    many: Size
    restart: int = 64
    idle: int = 2000
    polled: int = 1000
    nodes: int = 100
    many_nodes: int = 200
    rounds: int = 3
    window_s: float = 60.0
    idle_window_s: float = 300.0
    """Length of the idle window. It contains one full listing, as this is the operator's own interval."""


FULL = Sizes(
    small=Size(jobs=250, workers=4),
    large=Size(jobs=1, workers=1000),
    wide=Size(jobs=1000, workers=4),
    many=Size(jobs=2000, workers=10),
)
QUICK = Sizes(
    small=Size(jobs=40, workers=4),
    large=Size(jobs=1, workers=160),
    wide=Size(jobs=80, workers=4),
    many=Size(jobs=100, workers=10),
    restart=16,
    idle=100,
    polled=100,
    nodes=20,
    many_nodes=20,
    rounds=1,
    window_s=15.0,
    idle_window_s=15.0,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the verdict."""

    what: str
    measured: str
    target: str
    met: bool | None
    """Whether the target was met; None if the row has no target."""
    counted: bool = False
    """Whether the row counts requests or events.

    Such counts are the same on any machine and at any size, so that a quick run must meet them, too.
    """

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"| {self.what} | {self.measured} | {self.target} | {word} |"


@dataclass(kw_only=True)
class Results:
    """The measurements so far."""

    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    """One run per round, by contender and group."""
    restarts_s: list[float] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    idle: scale.Idle | None = None
    polling: scale.Polling | None = None
    many: scale.Many | None = None


class Session:
    """One cluster with one operator at a time."""

    def __init__(self, bench: Bench, kubeconfig: Path, folder: Path) -> None:
        self.bench = bench
        self._kubeconfig, self._folder = kubeconfig, folder

    @contextmanager
    def operator(self, env: dict[str, str] | None = None) -> Iterator[OperatorProcess]:
        """Run an operator. By default it polls no workers, as simulated pods do not answer."""
        silent = {"ZEROTRAIN_OPERATOR_CHANNEL": "silent"}
        with operator(self._kubeconfig, self._folder, {**silent, **(env or {})}) as process:
            yield process


@asynccontextmanager
async def session(nodes: int) -> AsyncIterator[Session]:
    build_tools("simulated")
    devcluster = Devcluster()
    with (
        tempfile.TemporaryDirectory() as name,
        devcluster.lease("simulated", "--nodes", str(nodes)) as cluster,
    ):
        folder = Path(name)
        kubeconfig = install(cluster, folder)
        api, telemetry = await open_api(cluster.kubeconfig)
        async with api:
            yield Session(Bench(cluster, api, Meter(devcluster, cluster, api, telemetry)), kubeconfig, folder)


async def rounds(here: Session, results: Results, group: str, size: Size, number: int) -> None:
    """Run all contenders in turn."""
    found = results.runs.setdefault(group, {name: [] for name in (ZEROTRAIN, *OTHERS)})
    with here.operator() as process:
        for _ in range(number):
            for name in _turns(found):
                run = await here.bench.measure(name, size, process)
                found[name].append(run)
                spent = run.spent
                say(
                    f"{group} {size} round {len(found[name])} {name}: {run.running_s:.1f} s, "
                    f"{1000 * spent.total_cpu_s / size.pods:.1f} ms of processor and "
                    f"{spent.requests / size.pods:.2f} requests per pod, "
                    f"{spent.allocated_bytes / size.pods / MIB:.2f} MiB allocated by the API server"
                )


def _turns(found: dict[str, list[Run]]) -> list[str]:
    """Return the contenders of the next round."""
    names = list(found)
    return names if len(found[names[-1]]) % 2 == 0 else names[::-1]


async def restart(here: Session, workers: int) -> float:
    """Return seconds from a rank's failure until all workers of the next attempt run."""
    namespace = await here.bench.namespace()
    pods = collection("Pod", namespace)
    first = RunningWatch(here.bench.cluster, namespace, labels="zerotrain.dev/attempt=1")
    second = RunningWatch(here.bench.cluster, namespace, labels="zerotrain.dev/attempt=2")
    try:
        await here.bench.create([zerotrain_job(namespace, "job", workers, podTemplate={})])
        await first.reached(workers)
        await asyncio.sleep(3)  # until the job is Running, too
        began = time.monotonic()
        failure = {"metadata": {"annotations": {"devcluster.zerotrain.dev/exit-code": "1"}}}
        await here.bench.patch(f"{pods}/job-1-{workers // 3}", failure)
        took = await second.reached(workers, timeout_s=60) - began
    finally:
        first.close()
        second.close()
        await here.bench.clean(namespace)
    say(f"restart of {workers}: {took:.2f} s")
    return took


async def killed(here: Session, size: Size) -> float:
    """Return seconds until all pods run, with the operator killed at a third and restarted at once."""
    with here.operator() as process:

        async def kill(watch: RunningWatch) -> None:
            await watch.reached(size.pods // 3)
            process.kill()
            process.start(wait=False)

        run = await here.bench.measure(ZEROTRAIN, size, process, meanwhile=kill)
        say(f"killed at a third of {size}: {run.running_s:.1f} s")
        return run.running_s


async def measure(sizes: Sizes, groups: Sequence[str], results: Results) -> None:
    if {"small", "large", "wide", "restart", "kill", "idle", "polling"} & set(groups):
        async with session(sizes.nodes) as here:
            await _warm_up(here)
            await _contests(here, sizes, groups, results)
            if "idle" in groups:
                results.idle = await scale.idle(
                    here.bench, here.operator, jobs=sizes.idle, window_s=sizes.idle_window_s
                )
                say(f"idle: {results.idle}")
            if "polling" in groups:
                results.polling = await scale.polling(
                    here.bench, here.operator, jobs=sizes.polled, window_s=sizes.window_s
                )
                say(f"polling: {results.polling}")
    if "many" in groups:
        async with session(sizes.many_nodes) as here:
            await _warm_up(here)
            results.many = await scale.many(
                here.bench, here.operator, size=sizes.many, window_s=sizes.window_s / 2
            )
            say(f"many: {results.many}")


async def _contests(here: Session, sizes: Sizes, groups: Sequence[str], results: Results) -> None:
    if "small" in groups or "kill" in groups:
        # A kill is compared with the undisturbed runs beside it.
        for _ in range(sizes.rounds):
            await rounds(here, results, "small", sizes.small, 1)
            if "kill" in groups:
                results.killed_s.append(await killed(here, sizes.small))
    if "large" in groups:
        await rounds(here, results, "large", sizes.large, sizes.rounds)
    if "wide" in groups:
        await rounds(here, results, "wide", sizes.wide, sizes.rounds)
    if "restart" in groups:
        with here.operator():
            for _ in range(sizes.rounds):
                results.restarts_s.append(await restart(here, sizes.restart))


async def _warm_up(here: Session) -> None:
    """Run every contender once: the first pods of a cluster are slow (caches, connections, rules)."""
    size = Size(jobs=5, workers=4)
    with here.operator() as process:
        here.bench.makers[OBJECTS] = (await Belongings.learned(here.bench)).create
        for name in (ZEROTRAIN, *OTHERS):
            await here.bench.measure(name, size, process)


def rows(sizes: Sizes, results: Results) -> list[Row]:
    """Return the verdict, in the order of the requirements."""
    found: list[Row] = []
    for group, requests in (("small", 2.5), ("wide", 2.5), ("large", 1.2)):
        if all(results.runs.get(group, {"": []}).values()):
            size: Size = getattr(sizes, group)
            found += _contest_rows(size, results.runs[group], requests)
    if results.restarts_s:
        took = statistics.median(results.restarts_s)
        found.append(_limit(f"restart of {sizes.restart} after one failure", took, 2.7, "s"))
    if results.killed_s and results.runs["small"][ZEROTRAIN]:
        undisturbed = statistics.median(run.running_s for run in results.runs["small"][ZEROTRAIN])
        cost = statistics.median(results.killed_s) - undisturbed
        found.append(
            _limit(f"SIGKILL at a third of {sizes.small}: beyond an undisturbed run", cost, 3.0, "s")
        )
    if results.idle is not None:
        what = f"operator at rest, {results.idle.jobs:,} jobs finished or suspended"
        found.append(_limit(what, results.idle.cpu_percent, 2.0, "% of a core"))
    if results.polling is not None:
        found.append(_polling_row(results.polling))
    if results.many is not None:
        found += _many_rows(results.many)
    return found


def _contest_rows(size: Size, runs: dict[str, list[Run]], requests: float) -> list[Row]:
    ours = runs[ZEROTRAIN]
    times = ", ".join(f"{name} {_median_s(runs[name]):.1f} s" for name in runs)
    cpu = {name: _per_pod(runs[name], size, lambda run: 1000 * run.spent.total_cpu_s) for name in runs}
    total = {name: _per_pod(runs[name], size, lambda run: run.spent.requests) for name in runs}
    own = _per_pod(ours, size, lambda run: run.spent.by_client["operator"])
    events = _per_pod(ours, size, lambda run: run.spent.by_client["operator events"]) * size.workers
    return [
        _reported(f"{size} until all run", times),
        *(_compared_with(size, other, ours, runs[other]) for other in (SAME, PLAIN, OBJECTS, SAME_BARE)),
        _reported(f"{size} processor time per pod", ", ".join(f"{n} {cpu[n]:.1f} ms" for n in cpu)),
        Row(
            what=f"{size} requests per pod, all clients",
            measured=f"{total[ZEROTRAIN]:.2f} (" + ", ".join(f"{n} {total[n]:.2f}" for n in OTHERS) + ")",
            target="<= 8",
            met=total[ZEROTRAIN] <= 8,
            counted=True,
        ),
        replace(
            _limit(f"{size} the operator's own requests per pod, events apart", own, requests, ""),
            counted=True,
        ),
        replace(_limit(f"{size} the operator's events per job", events, 3.0, ""), counted=True),
    ]


def _compared_with(size: Size, other: str, ours: Sequence[Run], theirs: Sequence[Run]) -> Row:
    """Return the row of one other contender. Only Jobs of equal pods do the same work; the rest show where
    the time goes.
    """
    ratio, spread = _ratio(ours, theirs)
    row = _reported(f"{size} all Running, beside {other}", f"{ratio:.2f} ({spread})")
    return replace(row, target="<= 1.5", met=ratio <= 1.5) if other == SAME else row


def _reported(what: str, measured: str) -> Row:
    """Return a row without a target."""
    return Row(what=what, measured=measured, target="reported", met=None)


def _ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[float, str]:
    """Return the median over the rounds of the ratio of the times, and its spread."""
    # Not strict: an interrupted run has no last round of the later contenders.
    ratios = [a.running_s / b.running_s for a, b in zip(ours, theirs, strict=False)]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 else "one round"
    return statistics.median(ratios), spread


def _median_s(runs: Sequence[Run]) -> float:
    return statistics.median(run.running_s for run in runs)


def _per_pod(runs: Sequence[Run], size: Size, value: Callable[[Run], float]) -> float:
    return statistics.median(value(run) / size.pods for run in runs)


def _limit(what: str, value: float, limit: float, unit: str) -> Row:
    end = f" {unit}" if unit else ""
    return Row(what=what, measured=f"{value:.2f}{end}", target=f"<= {limit}{end}", met=value <= limit)


def _polling_row(polling: scale.Polling) -> Row:
    return _reported(
        f"operator polling {polling.jobs:,} running jobs",
        f"{polling.cpu_percent:.1f} % of a core, each asked every {polling.every_s:.1f} s, "
        f"{polling.status_writes_per_s:.1f} status writes/s",
    )


def _many_rows(many: scale.Many) -> list[Row]:
    at = f"{many.size.jobs:,} jobs, {many.size.pods:,} pods"
    return [
        _reported(f"{at}: all Running", f"{many.running_s:.0f} s"),
        _limit(f"{at}: p99 of a pass, its requests included", many.pass_p99_s, 1.2, "s"),
        _reported(
            f"{at}: p99 of one creation within those passes",
            f"{many.creation_p99_s:.2f} s (median {1000 * many.creation_p50_s:.0f} ms)",
        ),
        _limit(f"{at}: resident memory", many.resident_bytes / MIB, 200, "MiB"),
        _limit(f"{at}: resident memory at its highest", many.peak_bytes / MIB, 200, "MiB"),
        _limit(f"{at}: highest after a restart", many.restarted_peak_bytes / MIB, 200, "MiB"),
        _reported(
            f"{at}: operator once all run; a restart until it acts",
            f"{many.running_cpu_percent:.1f} % of a core; {many.restart_s:.1f} s",
        ),
    ]


def breakdown(results: Results) -> list[str]:
    """Return lines that attribute the processor time and the requests of the operator's runs."""
    lines = []
    for group, runs in results.runs.items():
        for name, several in runs.items():
            if not several:
                continue
            spent = several[-1].spent
            cpu = ", ".join(
                f"{key} {value:.2f}" for key, value in sorted(spent.cpu_s.items()) if value >= 0.01
            )
            asked = ", ".join(f"{key} {value:.0f}" for key, value in sorted(spent.by_client.items()))
            lines.append(
                f"{group} {name}: processor s: {cpu} (machine {spent.machine_cpu_s:.2f}); "
                f"requests: {asked}, all {spent.requests:.0f}"
            )
    return lines


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: times have no say")
    parser.add_argument("--groups", default=",".join(GROUPS), help="some of the default, with commas")
    parser.add_argument("--rounds", type=int, help="rounds of the interleaved groups")
    parser.add_argument("--json", type=Path, help="write everything that was measured there")
    options = parser.parse_args(arguments)
    groups = options.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--groups: {', '.join(sorted(unknown))} is none of {', '.join(GROUPS)}")
    sizes = QUICK if options.quick else FULL
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    results = Results()
    try:
        asyncio.run(measure(sizes, groups, results))
    finally:  # print what was measured before an interruption
        report(sizes, results, options.json)
    return exit_code(rows(sizes, results), quick=options.quick)


def exit_code(found: Sequence[Row], *, quick: bool) -> int:
    """Return 1 if a target was missed; in a quick run only targets that do not depend on time count."""
    return int(any(row.met is False and (row.counted or not quick) for row in found))


def report(sizes: Sizes, results: Results, path: Path | None) -> None:
    print("\n" + "\n".join(breakdown(results)))
    print("\n| | measured | target | |\n|---|---|---|---|")
    print("\n".join(map(str, rows(sizes, results))))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(results), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
