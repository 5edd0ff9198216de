"""Overhead per parameter: a whole step of 1,000 parameters of 16 elements, clip and optimizer included.

    python -m tests.benchmarks.bench_small_params --help

zerotrain's stages run beside DDP with torch's clipping and fused AdamW, in fp32. Each contender has its own
rank processes, which step in turn. The figure is the median over the rounds of the ratio to DDP of the same
round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from tests.benchmarks.contenders import Sizes
from tests.benchmarks.team import Team, run_alternately

REFERENCE = "small-ddp"
NAMES = ("small-limit", REFERENCE, *(f"small-zerotrain-{stage}" for stage in range(4)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"ranks": 2, "rounds": 51, "warmup": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    options = parser.parse_args()
    teams: list[Team] = []
    try:
        for name in NAMES:
            team = Team(name, Sizes(), python=Path(sys.executable), ranks=options.ranks, threads=1)
            teams.append(team)
            team.warm_up(options.warmup)
        run_alternately(teams, rounds=options.rounds, progress=lambda _text: None)
    finally:
        for team in teams:
            team.close()
    base = next(team for team in teams if team.name == REFERENCE).measured.seconds
    print(f"1,000 parameters of 16 elements, {options.ranks} ranks, medians of {options.rounds} rounds")
    print(f"{'contender':18} {'step ms':>8} {'cpu ms':>8} {'/ DDP':>7} {'middle half':>13}")
    for team in teams:
        mine = team.measured
        ratios = [a / b for a, b in zip(mine.seconds, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{team.name:18} {statistics.median(mine.seconds) * 1e3:8.2f}"
            f" {statistics.median(mine.cpu_seconds) * 1e3:8.2f} {middle:7.2f} {low:6.2f}-{high:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
