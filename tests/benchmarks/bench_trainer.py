"""Overhead of transformers' Trainer on this engine, beside its overhead on DDP, as a ratio of ratios.

    python -m tests.benchmarks.bench_trainer --help

Four contenders train the same Llama on the same tokens, each in its own rank processes, which step in turn:
a Trainer on this engine and on DDP, and a loop of one's own on each. The figure is the median over the rounds
of (Trainer on the engine / own loop on the engine) / (Trainer on DDP / own loop on DDP).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.bench_step import log, ratio
from tests.benchmarks.contenders import Sizes
from tests.benchmarks.team import Measured, Team, run_alternately
from tests.benchmarks.trainers import STAGES

TARGET = 1.03
SIZES = Sizes(layers=6, d_model=512, heads=8, context=255, vocabulary=8192, micro=2)


def run(stage: int, options: argparse.Namespace) -> dict[str, Measured]:
    """Run the four contenders of a stage, resident at once."""
    names = ("own-ddp", f"own-zerotrain-{stage}", "trainer-ddp", f"trainer-zerotrain-{stage}")
    teams: list[Team] = []
    try:
        for name in names:
            log(f"building {name}")
            team = Team(name, SIZES, python=Path(sys.executable), ranks=2, threads=options.threads)
            teams.append(team)
            team.warm_up(options.warmup)
        run_alternately(teams, rounds=options.rounds, progress=log)
        return {team.name: team.measured for team in teams}
    finally:
        for team in teams:
            team.close()


def report(stage: int, found: Mapping[str, Measured]) -> None:
    own_ddp, own, trainer_ddp, trainer = (measured.seconds for measured in found.values())
    for name, measured in found.items():
        print(f"{name:22} {statistics.median(measured.seconds) * 1e3:8.0f} ms")
    for what, one, other in (("this engine", trainer, own), ("DDP", trainer_ddp, own_ddp)):
        middle, low, high = ratio(one, other)
        print(f"Trainer / own loop, on {what:12} {middle:6.3f} ({low:.3f}-{high:.3f})")
    ours = [one / other for one, other in zip(trainer, own, strict=True)]
    theirs = [one / other for one, other in zip(trainer_ddp, own_ddp, strict=True)]
    middle, low, high = ratio(ours, theirs)
    verdict = "met" if middle <= TARGET else "MISSED"
    print(f"stage {stage}: overhead {middle:.3f} ({low:.3f}-{high:.3f}), target {TARGET}: {verdict}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"rounds": 21, "warmup": 2, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    options = parser.parse_args()
    for stage in options.stages:
        report(stage, run(stage, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
