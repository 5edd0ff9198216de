"""Planned against resident memory: plans a preset, trains it for a few steps as local processes, prints both.

python -m tests.benchmarks.bench_plan --presets gpt-25m gpt-125m
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zerotrain.contract.planner import Tier, demand
from zerotrain.operator.api.plan_inputs import workload_of
from zerotrain.operator.api.spec import ZeroTrainingJobSpec

MIB = 1 << 20
COMMAND = [sys.executable, "-c", "from zerotrain.cli.main import main; main()"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["gpt-25m", "gpt-125m"])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"{'':<12}{'planned, a rank':>18}{'resident, rank 0':>18}")
    for preset in options.presets:
        spec = job_spec(preset, stage=options.stage, ranks=options.ranks)
        planned = demand(workload_of(ZeroTrainingJobSpec.model_validate(spec))).tier(Tier.HOST)
        assert planned is not None  # every job takes host memory
        print(
            f"{preset:<12}{planned.per_rank_bytes / MIB:>14.0f} MiB{resident(preset, spec) / MIB:>14.0f} MiB"
        )


def job_spec(preset: str, *, stage: int, ranks: int) -> dict[str, Any]:
    return {
        "workers": 1,
        "ranksPerWorker": ranks,
        "image": "example.org/image:1",
        "model": {"preset": preset},
        "data": {"path": "builtin:python-stdlib"},
        "steps": 3,
        "config": {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW"},
        },
    }


def resident(name: str, spec: dict[str, Any]) -> int:
    """Return the largest resident size of rank 0."""
    job = {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": name},
        "spec": spec,
    }
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder, "job.yaml"), Path(folder, "run")
        file.write_text(json.dumps(job))
        command = [*COMMAND, "run", str(file), "--run-dir", str(run)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
        report = json.loads((run / "attempts/1/report.json").read_text())
    return int(report["ranks"][0]["host_peak_bytes"])


if __name__ == "__main__":
    main()
