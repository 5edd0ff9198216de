"""Time, memory and traffic of one training step: zerotrain beside DDP, FSDP2 and DeepSpeed, as ratios.

    make bench                            # or: python -m tests.benchmarks.bench_step --help

Every contender trains the same 124 M-parameter GPT in bf16 on the same batches, each in its own rank
processes, which step in turn (A B C A B C ...). A figure is the median over the rounds of a contender's time
divided by the reference's time of the same round. The limit is forward and backward alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from tests.benchmarks import deepspeed_env
from tests.benchmarks.contenders import ACTIVATIONS, LIMIT, Sizes
from tests.benchmarks.team import MIB, Measured, Team, drop_stale_locks, run_alternately, write_json

GROUPS: Mapping[str, tuple[str, ...]] = {
    "ddp": (LIMIT, "ddp-autocast", "ddp-bf16", "zerotrain-1", "zerotrain-2"),
    "stage3": (LIMIT, "fsdp2", "deepspeed-3", "zerotrain-3"),
    "deepspeed": (LIMIT, "deepspeed-1", "deepspeed-2", "zerotrain-1", "zerotrain-2"),
}
TARGETS = (
    ("ddp", "zerotrain-1", "ddp-autocast", 1.05),
    ("ddp", "zerotrain-2", "ddp-autocast", 1.05),
    ("ddp", "zerotrain-1", "ddp-bf16", None),
    ("ddp", "zerotrain-2", "ddp-bf16", None),
    ("stage3", "zerotrain-3", "fsdp2", 0.75),
    ("stage3", "zerotrain-3", "deepspeed-3", 0.85),
    ("deepspeed", "zerotrain-1", "deepspeed-1", None),
    ("deepspeed", "zerotrain-2", "deepspeed-2", None),
)
NOTES = {
    LIMIT: "forward+backward alone, bf16",
    "ddp-autocast": "fp32 masters, bf16 autocast, fused AdamW",
    "ddp-bf16": "bf16 weights and states, NO fp32 master",
    "fsdp2": "fp32 masters, bf16 compute and reduction",
}


def run_group(names: Sequence[str], options: argparse.Namespace, python: Path | None) -> dict[str, Measured]:
    """Run all contenders of a group, resident at once."""
    sizes = sizes_of(options)
    teams: list[Team] = []
    try:
        for name in names:
            if name.startswith("deepspeed") and python is None:
                continue
            chosen = python if name.startswith("deepspeed") and python else Path(sys.executable)
            log(f"building {name}")
            team = Team(name, sizes, python=chosen, ranks=options.ranks, threads=options.threads)
            teams.append(team)
            team.warm_up(options.warmup)
        run_alternately(teams, rounds=options.rounds, progress=log)
        for team in teams:
            team.finish(options.warmup + options.rounds)
        return {team.name: team.measured for team in teams}
    finally:
        for team in teams:
            team.close()


def sizes_of(options: argparse.Namespace) -> Sizes:
    return Sizes(**{item.name: getattr(options, item.name) for item in fields(Sizes)})


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, lowest, highest) ratio over the rounds."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def report_group(group: str, found: Mapping[str, Measured], activations: float) -> None:
    print(f"\n{group}: medians of {len(next(iter(found.values())).seconds)} rounds")
    print(
        f"{'contender':14} {'step ms':>8} {'cpu ms':>7} {'/limit':>7} {'spread':>11} {'peak MiB':>9}"
        f" {'steady':>7} {'formula':>8} {'loopback MiB':>13} {'sent MiB/rank':>14}  note"
    )
    base, width = found[LIMIT], 1.0 / MIB
    for name, mine in found.items():
        middle, low, high = ratio(mine.seconds, base.seconds)
        formula, sent = mine.facts.get("formula_bytes"), mine.facts.get("sent_bytes")
        print(
            f"{name:14} {statistics.median(mine.seconds) * 1e3:8.0f}"
            f" {statistics.median(mine.cpu_seconds) * 1e3:7.0f} {middle:7.2f} {low:5.2f}-{high:<5.2f}"
            f" {mine.peak_bytes * width:9.0f} {mine.steady_bytes * width:7.0f}"
            f" {text_of(None if formula is None else (formula + activations) * width):>8}"
            f" {statistics.median(mine.loopback_bytes) * width:13.0f}"
            f" {text_of(None if sent is None else sent * width):>14}  {NOTES.get(name, '')}"
        )


def text_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def measure_activations(options: argparse.Namespace) -> float:
    """Return the bytes of a step beside weights and gradients, which the byte formulas leave out."""
    team = Team(ACTIVATIONS, sizes_of(options), python=Path(sys.executable), ranks=1, threads=options.threads)
    try:
        team.warm_up(options.warmup)
        team.finish(options.warmup)
        return team.measured.steady_bytes - team.measured.facts["resident_bytes"]
    finally:
        team.close()


def report_targets(results: Mapping[str, Mapping[str, Measured]]) -> None:
    print("\nratios of step times (median, spread) and of peak memory")
    for group, mine, peer, target in TARGETS:
        found = results.get(group, {})
        if mine not in found or peer not in found:
            continue
        middle, low, high = ratio(found[mine].seconds, found[peer].seconds)
        memory = found[mine].peak_bytes / found[peer].peak_bytes
        result = "" if target is None else f"target {target:.2f}: {'met' if middle <= target else 'MISSED'}"
        print(f"{mine} / {peer:13} time {middle:5.2f} ({low:.2f}-{high:.2f})  memory {memory:5.2f}  {result}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for item in fields(Sizes):
        parser.add_argument(
            f"--{item.name.replace('_', '-')}", type=int, default=item.default, help="default %(default)s"
        )
    for name, default in {"ranks": 2, "rounds": 9, "warmup": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="per rank; default: processors / ranks")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument(
        "--deepspeed-python", type=Path, help="interpreter of an environment that has DeepSpeed"
    )
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--json", type=Path, help="write every measured value there")
    options = parser.parse_args()
    options.threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    return options


def main() -> int:
    options = parse()
    python: Path | None = None
    if not options.without_deepspeed and any("deepspeed" in "".join(GROUPS[g]) for g in options.groups):
        try:
            python = options.deepspeed_python or deepspeed_env.find_or_make()
        except deepspeed_env.DeepSpeedMissing as error:
            print(error, file=sys.stderr)
            return 1
    drop_stale_locks()
    results = {}
    activations = measure_activations(options)
    print(f"activations and other memory of a step without an engine: {activations / MIB:.0f} MiB")
    for group in options.groups:
        results[group] = run_group(GROUPS[group], options, python)
        report_group(group, results[group], activations)
    report_targets(results)
    write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
