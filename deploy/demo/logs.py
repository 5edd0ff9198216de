"""Collection of every loss, with step and time, from the log of worker 0 in every attempt."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from dataclasses import dataclass, field

from deploy.demo.kubectl import Kubectl

STEP_LINE = re.compile(r"\bstep[= ](?P<step>\d+)(?:/\d+)?\b.*?\bloss[= ](?P<loss>[0-9.]+(?:e-?\d+)?)")


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One logged step of one attempt; `seen_at` is this machine's monotonic clock."""

    attempt: int
    step: int
    loss: float
    seen_at: float


@dataclass
class LossLog:
    """Losses of one job, from `kubectl logs --follow` of worker 0's pod of every attempt."""

    kubectl: Kubectl
    job: str
    points: list[LossPoint] = field(default_factory=list)
    last_line: str = ""
    _following: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def follow(self, attempt: int) -> None:
        """Start to follow the attempt's worker 0, once. Its container must have started."""
        if attempt in self._following:
            return
        command = self.kubectl.command("logs", "--follow", f"{self.job}-{attempt}-0", "--container", "worker")
        process = subprocess.Popen(
            command, env=self.kubectl.environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._following[attempt] = process
        threading.Thread(target=self._read, args=(attempt, process), daemon=True).start()

    def of_attempt(self, attempt: int) -> list[LossPoint]:
        return [point for point in self.points if point.attempt == attempt]

    def forget(self) -> None:
        """Let `follow` start again, for streams that ended early.

        Lines that are read twice count once per step.
        """
        self._following.clear()

    def close(self) -> None:
        """Wait for the last lines, then end the followers."""
        for process in self._following.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _read(self, attempt: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None  # opened with PIPE
        for line in process.stdout:
            self.last_line = line.strip()
            found = STEP_LINE.search(line)
            if found:
                self.points.append(
                    LossPoint(attempt, int(found["step"]), float(found["loss"]), time.monotonic())
                )
