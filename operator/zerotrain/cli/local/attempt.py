"""One attempt of a local run: one launcher with this machine's ranks, the same program that a pod runs."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zerotrain.contract.progress import Termination
from zerotrain.contract.strict_json import read_json
from zerotrain.contract.variables import settings_in
from zerotrain.contract.worker_environment import LaunchSpec
from zerotrain.contract.worker_http import PROGRESS_PATH, WorkerReport
from zerotrain.runtime.launch.main import HTTP_FILE, REPORT_FILE
from zerotrain.runtime.launch.process import guarded
from zerotrain.runtime.launch.reaper import adopt_orphans, children, end_children

POLL_S = 0.25
HTTP_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The end of an attempt."""

    attempt: int
    termination: Termination
    report: WorkerReport | None
    """The ranks' last records; None if the launcher never served any."""

    @property
    def code(self) -> int:
        return self.termination.code

    @property
    def step(self) -> int:
        reported = self.report.slowest.step if self.report and self.report.slowest else 0
        return max(self.termination.step, reported)


class Attempt:
    """A running launcher."""

    def __init__(
        self,
        spec: LaunchSpec,
        program: Sequence[str],
        *,
        environ: Mapping[str, str],
        on_line: Callable[[str], None] | None,
    ) -> None:
        """Start the launcher, whose files are in `spec.run_dir`. `environ` is added to this process's.

        `on_line` receives the ranks' output, called from another thread, and output.log too; None leaves the
        output to this command's own, byte by byte.
        """
        self._spec = spec
        self._folder = spec.run_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last_report: WorkerReport | None = None
        adopt_orphans()
        self._before = frozenset(children(os.getpid()))
        environ = {**os.environ, **environ}
        self._popen = subprocess.Popen(
            # If this command is killed, the launcher checkpoints and ends, as on a request to stop.
            guarded([sys.executable, "-m", "zerotrain.runtime.launch", "--", *program], signal.SIGTERM),
            env={**environ, **spec.to_variable(settings_in(environ))},
            stdin=subprocess.DEVNULL,
            stdout=None if on_line is None else subprocess.PIPE,
            stderr=None if on_line is None else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this command, which sends a SIGTERM to the launcher
        )
        self._output: threading.Thread | None = None
        if on_line is not None:
            self._output = threading.Thread(target=self._read_output, args=(on_line,), daemon=True)
            self._output.start()

    def stop(self) -> None:
        """Ask the launcher for a checkpoint and then to end."""
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def ended(self) -> bool:
        """Return whether the launcher has ended, after a wait of at most POLL_S."""
        try:
            self._popen.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def report(self) -> WorkerReport | None:
        """Return the ranks' newest records; None while the launcher does not answer."""
        try:
            address = read_json(self._folder / HTTP_FILE)
            connection = http.client.HTTPConnection(address["host"], address["port"], timeout=HTTP_TIMEOUT_S)
            connection.request("GET", PROGRESS_PATH)
            self._last_report = self._read(connection.getresponse().read().decode())
            connection.close()
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return self._last_report

    def finish(self) -> AttemptEnd:
        """End all remaining processes of the attempt, and return how it ended. Call it after `ended`."""
        end_children(keep=self._before)
        if self._output is not None:
            self._output.join(timeout=2.0)
        status = self._popen.returncode
        code = 128 - status if status < 0 else status
        return AttemptEnd(
            attempt=self._spec.attempt, termination=self._termination(code), report=self._final_report()
        )

    def _termination(self, code: int) -> Termination:
        try:
            return Termination.from_json((self._folder / "termination.json").read_text())
        except (OSError, ValueError):  # the launcher was killed before it could write one
            return Termination(attempt=self._spec.attempt, code=code)

    def _final_report(self) -> WorkerReport | None:
        try:
            return self._read((self._folder / REPORT_FILE).read_text())
        except (OSError, ValueError):
            return self._last_report

    def _read(self, text: str) -> WorkerReport:
        return WorkerReport.from_json(text, max_ranks=len(self._spec.ranks))

    def _read_output(self, on_line: Callable[[str], None]) -> None:
        if self._popen.stdout is None:
            return
        with (self._folder / "output.log").open("w") as log:
            for line in self._popen.stdout:
                log.write(line)
                log.flush()
                on_line(line.rstrip("\n"))


def free_port() -> int:
    """Return a free port for the rendezvous.

    Another process may take it before rank 0 binds it; that ends in exit code 82 and another attempt.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
