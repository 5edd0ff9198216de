"""Runs of the real launcher with small rank programs, for the tests of launcher, channel and metrics."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.contract.progress import Termination
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.runtime.launch.main import HTTP_FILE

ROOT = Path(__file__).parent.parent.parent
DRIVER = """
import json, sys
from zerotrain.runtime.launch.main import main
from zerotrain.runtime.launch.supervisor import Limits
sys.exit(main(sys.argv[2:], limits=Limits(**json.loads(sys.argv[1]))))
"""
BUILT_IN_DRIVER = """
import json, sys
from zerotrain.runtime.launch import main as launcher
from zerotrain.runtime.launch.supervisor import Limits
launcher.DEFAULT_PROGRAM = tuple(sys.argv[3:])
sys.exit(launcher.main([], limits=Limits(**json.loads(sys.argv[1]))))
"""
"""The same as `DRIVER`, with the program in place of the built-in trainer."""
FAST = {"peer_grace_s": 0.3, "failing_rank_s": 60.0, "stop_grace_s": 60.0}
"""Short limits for pure waits, and long ones for ranks that end by themselves on a slow machine."""
DEADLINE_S = 180.0
"""Seconds far beyond what anything here takes: reached only when the tested property does not hold."""

RANK_PRELUDE = """
import os, signal, sys, time
from zerotrain.contract.progress import CheckpointProgress, Phase, Progress
from zerotrain.runtime.channel import RankChannel
RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["ZEROTRAIN_ATTEMPT"])
"""


@dataclass(kw_only=True)
class RunningLauncher:
    """A launcher process, its spec and its output."""

    popen: subprocess.Popen[bytes]
    spec: LaunchSpec

    def wait(self) -> int:
        return self.popen.wait(DEADLINE_S)

    def finish(self) -> tuple[int, str]:
        """Wait for the launcher; return its exit code and its output."""
        output, _ = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, output.decode()

    def request(
        self,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> tuple[int, bytes]:
        """Send a request to the launcher; return status and body."""
        connection = http.client.HTTPConnection(address, self.port, timeout=60)
        try:
            connection.request(
                "GET" if body is None else "POST", path, body=body, headers=dict(headers or {})
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def report(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.request("/progress")[1])
        return value

    def wait_for_ranks(self) -> None:
        """Wait until every rank has published a step.

        Until then a rank that never reports counts as ready.
        """
        eventually(lambda: all(rank["step"] for rank in self.report()["ranks"]), what="all ranks report")

    @property
    def port(self) -> int:
        path = self.spec.run_dir / HTTP_FILE
        eventually(lambda: path.exists() or self.popen.poll() is not None, what="the launcher serves")
        if not path.exists():
            raise AssertionError(f"the launcher ended without a port:\n{self.finish()[1]}")
        return int(json.loads(path.read_text())["port"])

    @property
    def termination(self) -> Termination:
        if self.spec.termination_log is None:
            raise ValueError("this launcher writes no termination message")
        return Termination.from_json(self.spec.termination_log.read_text())


def spec_for(folder: Path, *, ranks: int, **changes: Any) -> LaunchSpec:
    """Return the spec of a worker with `ranks` local ranks and all files under `folder`."""
    spec = LaunchSpec(
        job="demo",
        job_uid="uid-1",
        attempt=3,
        master_addr="127.0.0.1",
        world_size=ranks,
        node_rank=0,
        ranks_per_worker=ranks,
        config_path=folder / "ds_config.json",
        http_port=0,
        http_host="127.0.0.1",
        termination_log=folder / "termination.json",
        run_dir=folder / "run",
    )
    return replace(spec, **changes)


def rank_program(folder: Path, text: str) -> list[str]:
    """Return the command of a rank that runs `text` after the prelude."""
    path = folder / "rank.py"
    path.write_text(RANK_PRELUDE + textwrap.dedent(text))
    return [sys.executable, str(path)]


@contextmanager
def launched(
    folder: Path,
    text: str,
    *,
    ranks: int = 2,
    limits: Mapping[str, float] = FAST,
    command: list[str] | None = None,
    built_in: bool = False,
    **changes: Any,
) -> Iterator[RunningLauncher]:
    """Run a launcher whose ranks execute `text`; end all of its processes in any case."""
    spec = spec_for(folder, ranks=ranks, **changes)
    paths = [str(ROOT / "operator"), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    driver, program = BUILT_IN_DRIVER if built_in else DRIVER, command or rank_program(folder, text)
    popen = subprocess.Popen(
        [sys.executable, "-c", driver, json.dumps(limits), "--", *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **spec.to_variable()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield RunningLauncher(popen=popen, spec=spec)
    finally:
        popen.kill()
        popen.communicate(timeout=DEADLINE_S)


def eventually(condition: Callable[[], Any], *, what: str = "") -> None:
    """Poll until `condition()` is true; a network error counts as false."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if condition():
                return
        except (OSError, http.client.HTTPException):
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"never became true: {what or condition}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
