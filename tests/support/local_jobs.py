"""Job files whose ranks are small programs without torch, and the `zerotrain` command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.launcher import DEADLINE_S, RANK_PRELUDE, ROOT, eventually
from zerotrain.contract.worker_http import WorkerReport
from zerotrain.runtime.launch.reaper import children

COUNTING = """
import json
from pathlib import Path
folder = Path(os.environ["ZEROTRAIN_CHECKPOINT_DIR"])
folder.mkdir(parents=True, exist_ok=True)
saved = folder / f"rank-{RANK}"
step = int(saved.read_text()) if saved.exists() else 0
channel = RankChannel.from_env()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))

def save():
    # A killed rank must not leave half a file behind.
    unfinished = folder / f"unfinished-{RANK}"
    unfinished.write_text(str(step))
    unfinished.replace(saved)
    done = CheckpointProgress(step=step, path=str(folder), time=time.time())
    channel.publish(Progress(rank=RANK, attempt=ATTEMPT, phase=Phase.STEP, step=step, total_steps=STEPS,
                             loss=5.0 - step / 10, checkpoint=done, tokens_per_second=100.0))

while step < STEPS:
    step += 1
    on_step(step)
    save()
    if stop:
        channel.close()
        sys.exit(75)
    time.sleep(0.02)
channel.close()
"""


def job_file(folder: Path, on_step: str = "pass", *, steps: int = 5, name: str = "tiny", **spec: Any) -> Path:
    """Write a job of two ranks.

    They count to `steps`, save each step, and run `on_step` (with `step`) before it.
    """
    program = folder / "rank.py"
    body = textwrap.indent(textwrap.dedent(on_step), "    ")
    program.write_text(f"{RANK_PRELUDE}\nSTEPS = {steps}\ndef on_step(step):\n{body}\n    pass\n{COUNTING}")
    job = {
        "apiVersion": "zerotrain.dev/v1alpha1",
        "kind": "ZeroTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "workers": 2,
            "image": "example.org/image:1",
            "command": [sys.executable, str(program)],
            "config": {"train_micro_batch_size_per_gpu": 1},
            "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "gracePeriodSeconds": 20},
            "steps": steps,
        }
        | spec,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job, indent=1))
    return path


def environment(**extra: str) -> dict[str, str]:
    paths = [str(ROOT / "operator"), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


COMMAND = [sys.executable, "-c", "from zerotrain.cli.main import main; main()"]


def zerotrain(*args: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )


class RunningCommand:
    """A running `zerotrain run`."""

    def __init__(self, popen: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.popen = popen
        self.run_dir = run_dir

    def finish(self) -> tuple[int, str]:
        output, _ = self.popen.communicate(timeout=2 * DEADLINE_S)
        return self.popen.returncode, output.decode()

    def launcher(self, attempt: int) -> int:
        """Return the pid of the attempt's launcher, once it serves."""
        path = self.run_dir / "attempts" / str(attempt) / "http.json"
        eventually(path.exists)
        return int(json.loads(path.read_text())["pid"])

    def ranks(self, attempt: int) -> list[int]:
        """Return the pids of the attempt's ranks."""
        launcher = self.launcher(attempt)
        eventually(lambda: len(children(launcher)) == 2)
        return children(launcher)

    def wait_for_step(self, step: int) -> None:
        """Wait until both ranks have saved the step."""
        folder = self.run_dir / "checkpoints" / "tiny"
        eventually(
            lambda: all(int((folder / f"rank-{rank}").read_text()) >= step for rank in (0, 1)),
            what=f"step {step}",
        )

    def last_report(self, attempt: int) -> WorkerReport:
        return WorkerReport.from_json((self.run_dir / "attempts" / str(attempt) / "report.json").read_text())


@contextmanager
def running(job: Path, run_dir: Path, *args: str) -> Iterator[RunningCommand]:
    """Run the command in the background; kill it at the end if it still runs."""
    popen = subprocess.Popen(
        [*COMMAND, "run", str(job), "--run-dir", str(run_dir), *args],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield RunningCommand(popen, run_dir)
    finally:
        popen.kill()
        popen.communicate(timeout=DEADLINE_S)
