"""Exposed time of the optimizer when updates run behind the next forward pass.

    python -m tests.benchmarks.bench_just_in_time --help

One rank runs an engine with synchronous steps and one with just-in-time steps in turn, in blocks of steps.
There are three scenarios: spilled states (forward computes while the update waits for the disk); states in
memory beside a forward pass that leaves the cores idle, as on a GPU (it sleeps); and states in memory beside
a forward pass that uses the same cores. The figures are medians over the rounds: seconds of forward and of
the optimizer in synchronous steps, the exposed part of the latter in just-in-time steps, and the ratio of
whole steps. The optimizer's exposed time should fall by the smaller of the two; where the cores are shared,
the ratio should stay below 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrain.runtime as zt
from zerotrain.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Location of the states, and kind of forward pass."""

    name: str
    tier: str
    sleeps: bool = False
    """Whether forward sleeps as long as a synchronous update takes, with the cores idle."""


SCENARIOS = (
    Scenario(name="spilled states", tier="nvme"),
    Scenario(name="idle cores in forward", tier="cpu", sleeps=True),
    Scenario(name="shared cores", tier="cpu"),
)


class Blocks(nn.Module):
    """Linear layers in a row."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.pause_seconds = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            time.sleep(self.pause_seconds)
            hidden = torch.relu(block(hidden))
        return hidden.float().square().mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Medians of one block of steps, in seconds."""

    step: float
    forward: float
    optimizer: float


def engine_of(scenario: Scenario, folder: str, options: Any, *, just_in_time: bool) -> Engine:
    torch.manual_seed(0)
    model = Blocks(width=options.width, layers=options.layers)
    offload = {"device": scenario.tier, "nvme_path": folder, "just_in_time": just_in_time}
    config = {
        "train_batch_size": options.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 0, "offload_optimizer": offload},
    }
    engine, *_ = zt.initialize(model=model, config=config, unit_modules=[nn.Linear])
    return engine


def run_block(engine: Engine, data: torch.Tensor, steps: int) -> Sample:
    """Run a block of steps. The first one is not timed: its forward pass finds no update in flight."""
    taken = []
    for index in range(steps + 1):
        began = time.perf_counter()
        engine.backward(engine(data))
        result = engine.step()
        if index:
            taken.append((time.perf_counter() - began, result.seconds))
    engine.synchronize()
    return Sample(
        step=statistics.median(seconds for seconds, _ in taken),
        forward=statistics.median(phases["forward"] for _, phases in taken),
        optimizer=statistics.median(phases["optimizer"] for _, phases in taken),
    )


def measure(scenario: Scenario, options: Any) -> tuple[list[Sample], list[Sample]]:
    """Return samples of synchronous and of just-in-time steps, round by round."""
    data = torch.randn(options.batch, options.width, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        engines = [engine_of(scenario, folder, options, just_in_time=flag) for flag in (False, True)]
        warm = [run_block(engine, data, 2) for engine in engines]
        if scenario.sleeps:
            for engine in engines:
                engine.module.pause_seconds = warm[0].optimizer / options.layers
        rounds = [
            [run_block(engine, data, options.steps) for engine in engines] for _ in range(options.rounds)
        ]
        for engine in engines:
            engine.close()
    return [pair[0] for pair in rounds], [pair[1] for pair in rounds]


def report(scenario: Scenario, synchronous: list[Sample], just_in_time: list[Sample]) -> str:
    forward = statistics.median(sample.forward for sample in synchronous)
    optimizer = statistics.median(sample.optimizer for sample in synchronous)
    exposed = statistics.median(sample.optimizer for sample in just_in_time)
    ratios = sorted(b.step / a.step for a, b in zip(synchronous, just_in_time, strict=True))
    hidden = (optimizer - exposed) / min(forward, optimizer)
    return (
        f"{scenario.name:22} {forward * 1e3:9.1f} {optimizer * 1e3:9.1f} {exposed * 1e3:9.1f} {hidden:8.2f}"
        f" {statistics.median(ratios):8.3f} {ratios[0]:6.3f}-{ratios[-1]:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"width": 1024, "layers": 16, "batch": 128, "steps": 4, "rounds": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--folder", type=Path, default=None, help="where states are spilled")
    options = parser.parse_args()
    numel = options.layers * options.width * (options.width + 1)
    print(f"{numel / 1e6:.1f} M parameters, bf16, {torch.get_num_threads()} threads; milliseconds")
    print(
        f"{'':22} {'forward':>9} {'optimizer':>9} {'exposed':>9} {'hidden':>8} {'step':>8} {'of rounds':>13}"
    )
    for scenario in SCENARIOS:
        print(report(scenario, *measure(scenario, options)), flush=True)
    print("hidden: what is not exposed, as a part of the smaller of forward and optimizer; aim 0.9 or more")
    print("step: just-in-time / synchronous, median and extremes; aim below 1.03 with shared cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
