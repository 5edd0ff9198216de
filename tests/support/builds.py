"""What has to be built for tests: the clusters' programs, the pods' image, helm, Kueue, Prometheus.

A cold build takes minutes. All that the chosen tests need is built in the background, in the order of need,
while tests that need none of it run; a test that comes to its build too early waits for that one alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deploy.devcluster.cluster import ROOT, ClusterError

BUILD = ROOT / "deploy" / "devcluster" / "build.py"
EVERY_S = 15.0
QUIET_S = 5.0
"""What is cached is there before that, and is worth no line."""

STEPS = {
    "control-plane": ("tools", "--profile", "control-plane"),
    "simulated": ("tools", "--profile", "simulated"),
    "node": ("tools", "--profile", "node"),
    "image": ("image",),
    "helm": ("tools", "--tool", "helm"),
    "kueue": ("tools", "--tool", "kueue"),
    "monitoring": ("tools", "--tool", "monitoring"),
}
"""Name of a build -> arguments of build.py."""

OF_FIXTURE = {
    "control_plane": ("control-plane",),
    "devcluster": ("control-plane", "simulated"),
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
"""The builds that a fixture needs."""

CLUSTERS = frozenset({"control-plane", "simulated", "node", "image"})
"""Not needed where the tests are given a cluster."""


def needed(fixtures: Iterable[str]) -> list[str]:
    """Builds in the order in which these fixtures ask for them."""
    return list(dict.fromkeys(build for name in fixtures for build in OF_FIXTURE.get(name, ())))


class Progress:
    """Lines of builds on their way to a terminal: now and then one, and none of a build that is soon over."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._shown_at = clock() - EVERY_S + QUIET_S

    def line(self, build: str, text: str) -> None:
        if self._clock() - self._shown_at >= EVERY_S:
            self._shown_at = self._clock()
            self._write(f"\n[building {build}] {text.strip()}\n")


class Builds:
    """The builds of one process: each is made, or waited for, once."""

    def __init__(self, run: Sequence[str | Path] = (sys.executable, BUILD)) -> None:
        self._command = [str(word) for word in run]
        self._errors: dict[str, str | None] = {}
        self._terminal: int | None = None
        self._running: subprocess.Popen[str] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def show_on(self, terminal: int) -> None:
        """Progress goes to a copy of this descriptor."""
        self._terminal = os.dup(terminal)

    def start(self, names: Sequence[str]) -> None:
        """Make them one after the other, in the background."""
        self._thread = threading.Thread(target=self._make_all, args=(tuple(names),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End what is still being built; what was finished stays in the cache."""
        self._ended = True
        if (running := self._running) is not None:
            running.terminate()
        if self._thread is not None:
            self._thread.join()

    def finish(self, name: str) -> None:
        """Return when it is built, or its build failed. The build's lock lets one process build at a time."""
        if name not in self._errors:
            self._errors[name] = self._make(name)

    def require(self, name: str) -> None:
        """Raises ClusterError with what the build printed if it failed."""
        self.finish(name)
        if (error := self._errors[name]) is not None:
            raise ClusterError(error)

    def _make_all(self, names: tuple[str, ...]) -> None:
        for name in names:
            if self._ended:
                return
            self._make(name, background=True)

    def _make(self, name: str, *, background: bool = False) -> str | None:
        """Run one build to its end; what is wrong with it, or None."""
        command = [*self._command, *STEPS[name]]
        progress, lines = Progress(self._write), []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build:
            if background:
                self._running = build
            for line in build.stdout or ():
                lines.append(line)
                progress.line(name, line)
        if build.returncode == 0:
            return None
        return f"`{' '.join(command)}` ended with {build.returncode}:\n{''.join(lines[-60:])}"

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            os.write(self._terminal, text.encode())
