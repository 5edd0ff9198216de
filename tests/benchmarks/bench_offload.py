"""A training step with states in host memory or on NVMe: zerotrain beside DeepSpeed, as ratios.

    make bench-offload                    # or: python -m tests.benchmarks.bench_offload --help

Every contender trains the same GPT in bf16 on the same batches, each in its own rank processes, in turn (A B
C A B C ...). In a turn, one untimed step comes before several timed steps in a row. Each timed step thus
includes the background work (just-in-time updates) that the step before it left. A figure is the median over
the rounds of a contender's time divided by the reference's time of the same round.

DeepSpeed's nvme needs libaio and its header (Debian: libaio-dev) and writes plain bytes; ours are encrypted
unless the name says plain.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import deepspeed_env
from tests.benchmarks.bench_step import log, ratio
from tests.benchmarks.contenders import Sizes
from tests.benchmarks.team import (
    MIB,
    ROOT,
    ContenderFailed,
    Measured,
    Team,
    drop_stale_locks,
    run_alternately,
    write_json,
)

SMALL = Sizes()
MIDDLE = Sizes(layers=24, d_model=1024, heads=16)
LARGE = Sizes(layers=24, d_model=1792, heads=28)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Contenders that are resident at once."""

    sizes: Sizes
    names: tuple[str, ...]
    rounds: int
    steps: int
    """Timed steps in a row."""


CPU = ("deepspeed-2-cpu", "deepspeed-3-cpu", "zerotrain-3", "zerotrain-2-cpu", "zerotrain-3-cpu")
NVME = ("deepspeed-3-nvme", "zerotrain-3-nvme-plain", "zerotrain-3-nvme")
GROUPS: Mapping[str, Group] = {
    "cpu-124m": Group(sizes=SMALL, names=CPU, rounds=7, steps=2),
    "nvme-124m": Group(sizes=SMALL, names=NVME, rounds=7, steps=2),
    "cpu-350m": Group(sizes=MIDDLE, names=("deepspeed-3-cpu", "zerotrain-3-cpu"), rounds=3, steps=2),
    "nvme-350m": Group(sizes=MIDDLE, names=NVME, rounds=3, steps=2),
    "nvme-1b": Group(sizes=LARGE, names=("zerotrain-3-nvme",), rounds=2, steps=1),
}
TARGETS = (
    ("zerotrain-3-nvme", "deepspeed-3-nvme", 1.0),
    ("zerotrain-3-nvme", "zerotrain-3-nvme-plain", 1.25),
    ("zerotrain-2-cpu", "deepspeed-2-cpu", None),
    ("zerotrain-3-cpu", "deepspeed-3-cpu", None),
    ("zerotrain-3-cpu", "zerotrain-3", 1.15),
)
"""Our contender, the other one, and the largest allowed ratio of the first to the second.

The ratio for encryption is 1.10 with OpenSSL 3.2 or later, and with the wheel.
"""
MOST_SPILL_BYTES = 20.1
"""Largest number of bytes moved per parameter and step: 10 bytes of state, read and written, and padding."""


def run_group(group: Group, options: argparse.Namespace, python: Path | None) -> dict[str, Measured]:
    """Run the contenders of a group; print the error of one that cannot run, and leave it out."""
    teams: list[Team] = []
    try:
        for name in group.names:
            is_peer = name.startswith("deepspeed")
            if is_peer and python is None:
                continue
            log(f"building {name}")
            try:
                team = Team(
                    name,
                    group.sizes,
                    python=python if is_peer and python else Path(sys.executable),
                    ranks=options.ranks,
                    threads=options.threads,
                )
                teams.append(team)
                team.warm_up(options.warmup)
            except ContenderFailed as error:
                log(str(error))
                teams = [other for other in teams if other.name != name]
        rounds, steps = options.rounds or group.rounds, group.steps
        run_alternately(teams, rounds=rounds, progress=log, in_a_row=steps)
        for team in teams:
            team.finish(options.warmup + rounds * (steps + 1))
        return {team.name: team.measured for team in teams}
    finally:
        for team in teams:
            team.close()


def report_group(name: str, group: Group, found: Mapping[str, Measured]) -> None:
    numel = numel_of(group.sizes)
    print(f"\n{name}: {numel / 1e6:.0f} M parameters, {group.steps} steps a turn, medians of the rounds")
    print(
        f"{'contender':24} {'step ms':>8} {'spread':>13} {'cpu ms':>7} {'peak MiB':>9} {'steady':>7} "
        f"{'host':>6} {'by formula':>10} {'disk':>6} {'by formula':>10} {'drive B/param':>13} "
        f"{'spill B/param':>13}"
    )
    for contender, mine in found.items():
        times, facts = sorted(mine.seconds), mine.facts
        shown = [facts.get(f"{key}_bytes") for key in ("host", "host_formula", "disk", "disk_formula")]
        host, host_formula, disk, disk_formula = (mib(value) for value in shown)
        spill = facts.get("spill_bytes_per_parameter")
        print(
            f"{contender:24} {statistics.median(times) * 1e3:8.0f} "
            f"{times[0] * 1e3:6.0f}-{times[-1] * 1e3:<6.0f} {statistics.median(mine.cpu_seconds) * 1e3:7.0f} "
            f"{mine.peak_bytes / MIB:9.0f} {mine.steady_bytes / MIB:7.0f} {host:>6} {host_formula:>10} "
            f"{disk:>6} {disk_formula:>10} {statistics.median(mine.io_bytes) / numel:13.2f} "
            f"{'-' if spill is None else f'{spill:.2f}':>13}"
        )
    for contender, mine in found.items():
        spill = mine.facts.get("spill_bytes_per_parameter") or 0.0
        if spill:
            result = "met" if spill <= MOST_SPILL_BYTES else "MISSED"
            print(f"{contender}: {spill:.2f} bytes a parameter and step, target {MOST_SPILL_BYTES}: {result}")


def mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:.0f}"


def numel_of(sizes: Sizes) -> int:
    from zerotrain.contract.memory import gpt_parameter_count

    return gpt_parameter_count(
        d_model=sizes.d_model, layers=sizes.layers, context=sizes.context, vocab=sizes.vocabulary
    )


def report_targets(results: Mapping[str, Mapping[str, Measured]]) -> None:
    print("\nratios of step times (median, spread) and of peak memory")
    for group, found in results.items():
        for mine, peer, target in TARGETS:
            if mine not in found or peer not in found:
                continue
            middle, low, high = ratio(found[mine].seconds, found[peer].seconds)
            memory = found[mine].peak_bytes / found[peer].peak_bytes
            result = (
                "" if target is None else f"target {target:.2f}: {'met' if middle <= target else 'MISSED'}"
            )
            print(
                f"{group:10} {mine} / {peer:24} time {middle:5.2f} ({low:.2f}-{high:.2f})  "
                f"memory {memory:5.2f}  {result}"
            )
    for group, found in results.items():
        losses = {name: value.losses[-1] for name, value in found.items() if value.losses}
        print(f"{group:10} losses after the warm-up: " + ", ".join(f"{n} {v:.5f}" for n, v in losses.items()))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="default: the group's")
    parser.add_argument("--warmup", type=int, default=3, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="per rank; default: processors / ranks")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "spill", help="default %(default)s")
    parser.add_argument(
        "--deepspeed-python", type=Path, help="interpreter of an environment that has DeepSpeed"
    )
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", type=Path, help="write every measured value there")
    options = parser.parse_args(arguments)
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    return options


def deepspeed_python(options: argparse.Namespace) -> Path | None:
    """Return the interpreter for DeepSpeed, or None without DeepSpeed; print what is missing."""
    if options.without_deepspeed:
        return None
    if not Path("/usr/include/libaio.h").exists():
        log(
            "DeepSpeed's nvme needs libaio's header (Debian: apt-get install libaio-dev); it will be left out"
        )
    found = options.deepspeed_python or deepspeed_env.find_or_make()
    return Path(found)


def main() -> int:
    options = parse()
    try:
        python = deepspeed_python(options)
    except deepspeed_env.DeepSpeedMissing as error:
        print(error, file=sys.stderr)
        return 1
    drop_stale_locks()
    options.folder.mkdir(parents=True, exist_ok=True)
    # This process reads the ranks' memory, which a process that spills does not allow by default.
    os.environ |= {"ZEROTRAIN_NVME_PATH": str(options.folder), "ZEROTRAIN_KEEP_READABLE": "1"}
    results = {}
    for name in options.groups:
        results[name] = run_group(GROUPS[name], options, python)
        report_group(name, GROUPS[name], results[name])
    report_targets(results)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
