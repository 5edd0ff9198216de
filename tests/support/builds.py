"""Builds that the tests need: the clusters' programs, the pods' image, helm, Kueue, Prometheus.

A cold build takes minutes. Everything that the chosen tests need is built in the background, in the order of
need, while tests that need no build run. A test that starts before its build is done waits for that build
alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deploy.devcluster.cluster import ROOT, ClusterError

BUILD = ROOT / "deploy" / "devcluster" / "build.py"
EVERY_S = 15.0
QUIET_S = 5.0
"""Seconds after which a build is reported; cached builds are done before that."""

KEPT_LINES = 60
"""Lines of a build's output that the error of a dependent test shows."""

FOLDER_VARIABLE = "ZEROTRAIN_TEST_BUILDS"
"""Name of the variable with the session's folder, in which its processes record finished builds."""

STEPS = {
    "control-plane": ("tools", "--profile", "control-plane"),
    "simulated": ("tools", "--profile", "simulated"),
    "node": ("tools", "--profile", "node"),
    "image": ("image",),
    "helm": ("tools", "--tool", "helm"),
    "kueue": ("tools", "--tool", "kueue"),
    "monitoring": ("tools", "--tool", "monitoring"),
}
"""Arguments of build.py by name of the build."""

OF_FIXTURE = {
    "control_plane": ("control-plane",),
    "devcluster": ("control-plane",),
    "simulated_cluster": ("simulated",),
    "node_tools": ("node",),
    "node_cluster": ("node", "image"),
    "helm": ("helm",),
    "kueue": ("kueue",),
    "prometheus": ("monitoring",),
    "promtool": ("monitoring",),
    "alertmanager": ("monitoring",),
    "amtool": ("monitoring",),
}
"""Builds that a fixture needs, by the fixture's name."""

CLUSTERS = frozenset({"control-plane", "simulated", "node", "image"})
"""Builds that are not needed when the tests are given a cluster."""


def needed(fixtures: Iterable[str]) -> list[str]:
    """Return the builds in the order in which these fixtures need them."""
    return list(dict.fromkeys(build for name in fixtures for build in OF_FIXTURE.get(name, ())))


class Progress:
    """Progress lines of builds on a terminal: one line now and then, and none for a short build."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._shown_at = clock() - EVERY_S + QUIET_S

    def line(self, build: str, text: str) -> None:
        if self._clock() - self._shown_at >= EVERY_S:
            self._shown_at = self._clock()
            self._write(f"\n[building {build}] {text.strip()}\n")


class Builds:
    """The builds of one session: each process makes, or waits for, those that its tests need.

    `folder` belongs to the session. A build that one process recorded there as finished is not checked again
    by the others.
    """

    def __init__(self, folder: Path, *, command: Sequence[str | Path] = (sys.executable, BUILD)) -> None:
        self._folder = folder
        self._command = [str(word) for word in command]
        self._errors: dict[str, str | None] = {}
        self._terminal: int | None = None
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def show_on(self, terminal: int) -> None:
        """Write progress to a copy of this descriptor."""
        self._terminal = os.dup(terminal)

    def start(self, names: Sequence[str]) -> None:
        """Make the builds one after the other, in the background."""
        self._thread = threading.Thread(target=self._make_all, args=(tuple(names),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Terminate the running build; finished ones stay in the cache."""
        self._stopped = True
        if (running := self._running) is not None:
            running.terminate()
        if self._thread is not None:
            self._thread.join()

    def all_done(self) -> bool:
        """Return whether every build that was started is done or has failed."""
        return (self._folder / "all-built").exists()

    def finish(self, name: str) -> None:
        """Wait until the build is done or has failed. If two processes need the same build, one waits."""
        if name not in self._errors:
            self._errors[name] = None if self._done(name).exists() else self._make(name)

    def require(self, name: str) -> None:
        """Wait for the build; raise ClusterError with its output if it failed."""
        self.finish(name)
        if (error := self._errors[name]) is not None:
            raise ClusterError(error)

    def _make_all(self, names: tuple[str, ...]) -> None:
        for name in names:
            if self._stopped:
                return
            self._make(name, background=True)
        (self._folder / "all-built").touch()

    def _make(self, name: str, *, background: bool = False) -> str | None:
        """Run one build to its end; return the text of its failure, or None."""
        command = [*self._command, *STEPS[name]]
        progress, lines = Progress(self._write), deque[str](maxlen=KEPT_LINES)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build:
            if background:
                self._running = build
            for line in build.stdout or ():
                lines.append(line)
                progress.line(name, line)
        if build.returncode == 0:
            self._done(name).touch()
            return None
        return f"`{' '.join(command)}` ended with {build.returncode}:\n{''.join(lines)}"

    def _done(self, name: str) -> Path:
        return self._folder / f"built-{name}"

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            os.write(self._terminal, text.encode())
