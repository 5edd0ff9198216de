"""Losses and step time of unchanged scripts on this engine, beside DeepSpeed itself and beside DDP.

    python -m tests.benchmarks.bench_scripts --help

Each script of `tests/support/hf_cases.py` runs as two ranks on DDP, on DeepSpeed and on this engine, in
turn, with the same DeepSpeed JSON, for 20 optimizer steps in fp32. The time compared is the median from one
backward pass to the next: checkpoints and evaluations come after few of them. The losses of all passes are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import deepspeed_env
from tests.benchmarks.bench_step import log, ratio
from tests.support.hf_cases import OTHERS_CASES, OWN_CASES, TIERS, Assets
from tests.support.hf_parity import Bench
from tests.support.hf_scripts import Losses, apart

CASES = {**OWN_CASES, **OTHERS_CASES}
DEFAULT = ("trainer", "lora", "sft", "dpo", "reward")
TOLERANCE = 1e-3


def step_seconds(runs: Sequence[Losses]) -> float:
    """Return the slower rank's median seconds from one backward pass to the next."""
    return max(
        statistics.median(b - a for a, b in zip(run.times, run.times[1:], strict=False)) for run in runs
    )


def loss_difference(runs: Sequence[Losses], others: Sequence[Losses]) -> float:
    """Return the largest difference of a loss, without what else the scripts log."""
    return max(apart(mine.losses, theirs.losses) for mine, theirs in zip(runs, others, strict=True))


def run(bench: Bench, name: str, tier: str, python: Path, rounds: int) -> bool:
    """Run a script on the three in turn and print what was measured; return whether the losses agree."""
    seconds: dict[str, list[float]] = {"DDP": [], "DeepSpeed": [], "zerotrain": []}
    for number in range(rounds):
        log(f"{name}, tier {tier}, round {number + 1} of {rounds}")
        ddp = bench.run(name, CASES[name], None)
        theirs = bench.run(name, CASES[name], tier, deepspeed_python=python)
        ours = bench.run(name, CASES[name], tier)
        for engine, runs in zip(seconds, (ddp, theirs, ours), strict=True):
            seconds[engine].append(step_seconds(runs))
    differences = [loss_difference(ours, theirs), loss_difference(ours, ddp), loss_difference(theirs, ddp)]
    milliseconds = [statistics.median(each) * 1e3 for each in seconds.values()]
    beside = [ratio(seconds["zerotrain"], seconds[other]) for other in ("DeepSpeed", "DDP")]
    columns = [name, tier, *(f"{each:.0f}" for each in milliseconds)]
    columns += [f"{middle:.2f} ({low:.2f}-{high:.2f})" for middle, low, high in beside]
    print("|", " | ".join([*columns, *(f"{each:.0e}" for each in differences)]), "|", flush=True)
    return differences[0] <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", nargs="+", choices=CASES, default=DEFAULT)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=["2", "3"])
    parser.add_argument("--deepspeed-python", type=Path, help="default: an environment made under build/")
    for option, default in {"rounds": 3, "width": 256, "layers": 4}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help="default %(default)s")
    options = parser.parse_args()
    python = options.deepspeed_python or deepspeed_env.find_or_make()
    with tempfile.TemporaryDirectory() as folder:
        assets = Assets(folder=Path(folder) / "assets").make(width=options.width, layers=options.layers)
        bench = Bench(folder=Path(folder), assets=assets)
        print(
            "| script | tier | DDP ms | DeepSpeed ms | zerotrain ms | / DeepSpeed | / DDP | losses beside "
            "DeepSpeed | beside DDP | DeepSpeed beside DDP |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        agree = [
            run(bench, name, tier, python, options.rounds)
            for name in options.scripts
            for tier in options.tiers
        ]
    print(f"losses within {TOLERANCE:.0e} of DeepSpeed's: {sum(agree)} of {len(agree)}")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
