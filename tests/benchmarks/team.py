"""The rank processes of one contender, controlled by the benchmark's process.

Every contender has its own processes, so that no allocator, thread pool or imported library of one affects
another. One contender steps at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.contenders import Sizes

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "build" / "deepspeed-extensions"
"""Folder of the extensions that DeepSpeed compiles at their first use."""
SAMPLE_EVERY_SECONDS = 0.02
MIB = 1 << 20


class ContenderFailed(RuntimeError):
    """A rank process ended; its output is in the message."""


@dataclass(kw_only=True)
class Measured:
    """Results of the rounds; one entry per round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    loopback_bytes: list[int] = field(default_factory=list)
    io_bytes: list[float] = field(default_factory=list)
    """Bytes to and from drives of all ranks; only in rounds of several steps."""
    peak_bytes: float = 0.0
    """Highest proportional set size of a rank while it built and stepped, above that after its imports."""
    steady_bytes: float = 0.0
    """The same without the time of building."""
    facts: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


class Team:
    """The ranks of one contender. `close()` ends the processes."""

    def __init__(
        self, name: str, sizes: Sizes, *, python: Path, ranks: int, threads: int, root: Path = ROOT
    ) -> None:
        """Start the processes and build the contender while its memory is watched.

        `root` is the checkout whose code it runs.
        """
        self.name = name
        self.measured = Measured()
        self._folder = tempfile.TemporaryDirectory()
        task = {"name": name, "sizes": asdict(sizes), "world_size": ranks, "threads": threads}
        task["store"] = str(Path(self._folder.name) / "store")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "runtime")]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",
            "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        }
        self._log = open(Path(self._folder.name) / "log", "w+")  # noqa: SIM115  (closed by close)
        self._ranks = [
            subprocess.Popen(
                [str(python), "-m", "tests.benchmarks.rank", json.dumps(task | {"rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
                cwd=root,
            )
            for rank in range(ranks)
        ]
        try:
            self._base = [answer["base_bytes"] for answer in self._answers()]
            self.measured.peak_bytes = self._watch(self._answers)
        except BaseException:
            self.close()  # the rank that did not fail waits for the other
            raise

    def step(self, in_a_row: int = 0) -> None:
        """Time one step, or the mean of several after one that is not timed."""
        before = loopback_bytes()
        answers = self._ask(f"steps {in_a_row}" if in_a_row else "step")
        measured = self.measured
        if in_a_row:
            measured.io_bytes.append(sum(answer["io_bytes"] for answer in answers))
        measured.seconds.append(max(answer["seconds"] for answer in answers))
        measured.cpu_seconds.append(sum(answer["cpu_seconds"] for answer in answers))
        measured.loopback_bytes.append(loopback_bytes() - before)

    def warm_up(self, steps: int) -> None:
        """Run steps that are not timed, and watch the memory."""

        def run() -> Any:
            for _ in range(steps):
                answers = self._ask("step")
                self.measured.losses.append(sum(a["loss"] for a in answers) / len(answers))
            return None

        self.measured.steady_bytes = self._watch(run)
        self.measured.peak_bytes = max(self.measured.peak_bytes, self.measured.steady_bytes)

    def finish(self, steps: int) -> None:
        """Get the engine's own counts; bytes sent are per step."""
        facts = self._ask("facts")[0]
        if "sent_bytes" in facts:
            facts["sent_bytes"] /= steps
        self.measured.facts = facts

    def close(self) -> None:
        for process in self._ranks:
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
        self._log.close()
        self._folder.cleanup()

    def _ask(self, command: str) -> list[dict[str, Any]]:
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = []
        for process in self._ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self._log.seek(0)
                tail = self._log.read()[-3000:]
                raise ContenderFailed(f"a rank of {self.name} ended:\n{tail}")
            lines.append(json.loads(line))
        return lines

    def _watch(self, work: Callable[[], Any]) -> float:
        """Do `work` and return a rank's highest memory meanwhile, above its base."""
        peaks, stop = [0.0] * len(self._ranks), threading.Event()

        def sample() -> None:
            while not stop.is_set():
                for index, process in enumerate(self._ranks):
                    peaks[index] = max(peaks[index], pss_bytes(process.pid) - self._base[index])
                time.sleep(SAMPLE_EVERY_SECONDS)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            work()
        finally:
            stop.set()
            thread.join()
        return max(peaks)


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def loopback_bytes() -> int:
    """Return the bytes received through the loopback device since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


def run_alternately(
    teams: Sequence[Team], *, rounds: int, progress: Callable[[str], None], in_a_row: int = 0
) -> None:
    """Run the teams in turn (A B C A B C ...), each turn one step or several in a row."""
    for number in range(rounds):
        for team in teams:
            team.step(in_a_row)
        progress(f"round {number + 1} of {rounds}")


def drop_stale_locks() -> None:
    """Remove locks of interrupted builds of DeepSpeed's extensions, as every rank would wait for them."""
    for lock in EXTENSIONS.glob("*/lock"):
        lock.unlink()


def write_json(path: Path | None, results: Mapping[str, Mapping[str, Measured]]) -> None:
    """Write every measured value by group and contender if a file is given."""
    if path is not None:
        plain = {
            group: {name: asdict(value) for name, value in found.items()} for group, found in results.items()
        }
        path.write_text(json.dumps(plain, indent=1))
