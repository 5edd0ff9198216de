"""One step on one GPU: zerotrain beside plain torch and FSDP2, weights and states on the GPU and off it.

    python -m tests.benchmarks.bench_gpu --help

As `bench_step`: every contender in a process of its own, stepped in turn, ratios within rounds. One rank, so
that nothing is said about what goes between GPUs.
"""

from __future__ import annotations

import os

os.environ["ZEROTRAIN_TEST_DEVICE"] = "cuda"  # the ranks inherit it

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch

from tests.benchmarks.bench_step import NOTES, log, ratio, sizes_of
from tests.benchmarks.contenders import LIMIT, Sizes
from tests.benchmarks.team import MIB, ContenderFailed, Measured, Team, run_alternately, write_json

GROUPS: Mapping[str, tuple[str, ...]] = {
    # One rank has nothing to shard: unless something is offloaded, every stage takes the path of stage 0.
    "resident": (LIMIT, "ddp-autocast", "ddp-bf16", "fsdp2", "zerotrain-0"),
    "offloaded": (LIMIT, "fsdp2-offloaded", "zerotrain-2-cpu", "zerotrain-3-cpu", "zerotrain-3-nvme"),
}
PEERS = {"resident": "ddp-autocast", "offloaded": "fsdp2-offloaded"}
DEFAULTS = {"layers": 24, "d_model": 1024, "heads": 16, "context": 1024, "micro": 4}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for item in fields(Sizes):
        default = DEFAULTS.get(item.name, item.default)
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=int, default=default, help="default %(default)s"
        )
    for name, value in {"rounds": 15, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default %(default)s")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--contenders", nargs="+", help="some of a group's; default all")
    parser.add_argument("--json", type=Path, help="write every measured value there")
    return parser.parse_args()


def run_group(group: str, options: argparse.Namespace) -> dict[str, Measured]:
    """Run all contenders of a group, resident at once; report the error of a failed one and leave it out."""
    teams: list[Team] = []
    try:
        for name in contenders_of(group, options):
            log(f"building {name}")
            if (team := start(name, options)) is not None:
                teams.append(team)
        if missing := {LIMIT, PEERS[group]} - {team.name for team in teams}:
            raise ContenderFailed(f"nothing to compare with: {', '.join(missing)} failed")
        run_alternately(teams, rounds=options.rounds, progress=lambda _: None, in_a_row=2)
        for team in teams:
            team.finish(options.warmup + 3 * options.rounds)
        return {team.name: team.measured for team in teams}
    finally:
        for team in teams:
            team.close()


def contenders_of(group: str, options: argparse.Namespace) -> list[str]:
    """Return the selected contenders and those that all are compared with."""
    always = (LIMIT, PEERS[group])
    asked = options.contenders
    return [name for name in GROUPS[group] if asked is None or name in asked or name in always]


def start(name: str, options: argparse.Namespace) -> Team | None:
    """Return a contender after its first steps, or None after printing its error."""
    threads = os.cpu_count() or 1
    try:
        team = Team(name, sizes_of(options), python=Path(sys.executable), ranks=1, threads=threads)
    except ContenderFailed as error:
        log(str(error))
        return None
    try:
        team.warm_up(options.warmup)
    except ContenderFailed as error:
        log(str(error))
        team.close()
        return None
    return team


def report_group(group: str, found: Mapping[str, Measured]) -> None:
    print(f"\n{group}: medians of {len(next(iter(found.values())).seconds)} rounds of two steps")
    peer = PEERS[group]
    print(
        f"{'contender':16} {'step ms':>8} {'/limit':>7} {'/' + peer:>16} {'spread':>11} {'GPU peak MiB':>13}"
        "  note"
    )
    for name, mine in found.items():
        to_peer, low, high = ratio(mine.seconds, found[peer].seconds)
        print(
            f"{name:16} {statistics.median(mine.seconds) * 1e3:8.1f}"
            f" {ratio(mine.seconds, found[LIMIT].seconds)[0]:7.2f} {to_peer:16.2f} {low:5.2f}-{high:<5.2f}"
            f" {mine.facts['gpu_peak_bytes'] / MIB:13.0f}  {NOTES.get(name, '')}"
        )
    sys.stdout.flush()


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("no GPU here", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} processors")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("ZEROTRAIN_NVME_PATH", folder)
        for group in options.groups:
            results[group] = run_group(group, options)
            report_group(group, results[group])
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
