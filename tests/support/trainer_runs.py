"""Ranks of the real trainer as processes, forked from one server that has torch imported already.

run = TrainerRun(folder, job(steps=4), world_size=2).start()
codes = run.wait()
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forkserver import CONTEXT
from tests.support.ports import free_port
from zerotrain.contract.worker_environment import LaunchSpec, RankEnv

TIMEOUT_S = 240.0
"""Seconds; far above what a run takes, so that a busy machine changes no outcome."""

STEP_LINE = re.compile(r"^step (\d+)/\d+ loss (\S+) ", re.MULTILINE)

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 40


def job(**changes: Any) -> dict[str, Any]:
    """Return a training job: a tiny model with dropout, and a checkpoint every two steps."""
    spec: dict[str, Any] = {
        "model": {"factory": "tests.support.factory_models:build", "factory_args": {}},
        "data_path": "",
        "steps": 4,
        "log_every_steps": 1,
        "checkpoint": {"every_steps": 2, "keep_last": 10},
    }
    return {**spec, **changes}


def config(**changes: Any) -> dict[str, Any]:
    """Return a DeepSpeed-style configuration: stage 3 with everything that holds state."""
    values: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
    }
    return {**values, **changes}


@dataclass
class TrainerRun:
    """One attempt. Its files are in `folder`; attempts share the checkpoint folder."""

    folder: Path
    job: dict[str, Any]
    config: dict[str, Any] = field(default_factory=config)
    world_size: int = 1
    attempt: int = 1
    checkpoint_dir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    file_limits: Mapping[int, int] = field(default_factory=dict)
    """Largest size in bytes of each file of a rank, by rank."""
    processes: list[Any] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    def start(self, ranks: range | None = None) -> TrainerRun:
        """Start all ranks, or only some."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.job["data_path"]:
            data = self.folder / "data.txt"
            data.write_text(TEXT)
            self.job["data_path"] = str(data)
        (self.folder / "train.json").write_text(json.dumps(self.job))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        for rank in ranks or range(self.world_size):
            environ = {**self._environ(rank), **self.env}
            process = CONTEXT.Process(
                target=_rank,
                args=(environ, str(self.log_path(rank)), self.file_limits.get(rank)),
                daemon=True,
            )
            process.start()
            self.processes.append(process)
        return self

    def wait(self) -> list[int]:
        """Return exit codes by rank; a rank that still runs after TIMEOUT_S is killed and shows as -9."""
        deadline = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]

    def finish(self) -> str:
        """Wait, check that every rank ended with 0, and return rank 0's log."""
        codes = self.wait()
        assert codes == [0] * len(codes), "\n".join(self.log(rank) for rank in range(len(codes)))
        return self.log(0)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for(self, text: str, rank: int = 0) -> None:
        """Wait until the rank's log holds `text`."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.log(rank):
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.log(rank)}"
            assert any(process.is_alive() for process in self.processes), self.log(rank)
            time.sleep(0.01)

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def log(self, rank: int) -> str:
        path = self.log_path(rank)
        return path.read_text() if path.exists() else ""

    def losses(self) -> dict[int, str]:
        """Return the printed losses by step."""
        return {int(step): loss for step, loss in STEP_LINE.findall(self.log(0))}

    def _environ(self, rank: int) -> dict[str, str]:
        launch = LaunchSpec(
            job="test",
            job_uid="uid",
            attempt=self.attempt,
            master_addr="127.0.0.1",
            master_port=self.port,
            world_size=self.world_size,
            node_rank=0,
            ranks_per_worker=self.world_size,
            config_path=self.folder / "config.json",
            train_spec_path=self.folder / "train.json",
            checkpoint_dir=self.checkpoint_dir,
            rendezvous_timeout_seconds=120.0,
            grace_seconds=120.0,
        )
        place = RankEnv(rank=rank, local_rank=rank, local_world_size=self.world_size)
        return {"OMP_NUM_THREADS": "1", **launch.to_env(), **place.to_env()}


def _rank(environ: dict[str, str], log: str, file_limit: int | None) -> None:
    """Run a rank in its process and end it with the trainer's own exit code."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(environ)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    import torch

    from zerotrain.runtime.train.main import main

    torch.set_num_threads(1)
    main(os.environ)


def newest_digests(checkpoint_dir: Path) -> list[str]:
    """Return SHA-256 of every rank's file of the newest checkpoint.

    Equal states and generators give equal digests.
    """
    latest = json.loads((checkpoint_dir / "latest").read_text())["folder"]
    manifest = json.loads((checkpoint_dir / latest / "manifest.json").read_text())
    return [entry["sha256"] for entry in manifest["files"]]
