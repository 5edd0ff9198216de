"""Processor time of a step of this checkout beside that of another one, e.g. the commit before a change.

    python -m tests.benchmarks.bench_checkouts ../other-checkout    # which has a .venv of its own; --help

Both run the same contenders of `contenders.py` in rank processes of their own, stepped in turn, every other
round backwards. The figure is the median over the rounds of the ratio of this checkout's processor time (all
ranks, one round of several steps) to the other's of the same round; wall time spreads far wider.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.contenders import Sizes
from tests.benchmarks.team import ROOT, Team

NAMES = (*(f"small-zerotrain-{stage}" for stage in range(4)), "zerotrain-1", "zerotrain-3")
SIZES = Sizes(layers=4, d_model=256, heads=4, vocabulary=4096)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--names", nargs="+", default=NAMES, help="contenders (default: %(default)s)")
    for name, default in {"ranks": 2, "rounds": 21, "steps": 10, "warmup": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    options = parser.parse_args()
    other = options.other.resolve()
    print(f"{'contender':18} {'cpu ms':>8} {'other':>8} {'ratio':>7} {'middle half':>13}")
    for name in options.names:
        mine, theirs = compare(name, other, options)
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:18} {statistics.median(mine) * 1e3:8.2f} {statistics.median(theirs) * 1e3:8.2f}"
            f" {middle:7.3f} {low:6.3f}-{high:.3f}",
            flush=True,
        )
    return 0


def compare(name: str, other: Path, options: argparse.Namespace) -> tuple[Sequence[float], Sequence[float]]:
    """Return seconds of processor time per step of this checkout and of the other, by round."""
    teams: list[Team] = []
    try:
        for root, python in ((ROOT, Path(sys.executable)), (other, other / ".venv" / "bin" / "python")):
            teams.append(Team(name, SIZES, python=python, ranks=options.ranks, threads=1, root=root))
            teams[-1].warm_up(options.warmup)
        for number in range(options.rounds):
            for team in reversed(teams) if number % 2 else teams:
                team.step(options.steps)
    finally:
        for team in teams:
            team.close()
    return teams[0].measured.cpu_seconds, teams[1].measured.cpu_seconds


if __name__ == "__main__":
    sys.exit(main())
