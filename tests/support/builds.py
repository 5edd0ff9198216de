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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deploy.devcluster.cluster import ROOT, ClusterError

BUILD = ROOT / "deploy" / "devcluster" / "build.py"
EVERY_S = 15.0
QUIET_S = 5.0
"""What is cached is there before that, and is worth no line."""

KEPT_LINES = 60
"""Of a build's output, for the error of the tests that need it."""

FOLDER_VARIABLE = "ZEROTRAIN_TEST_BUILDS"
"""Names the folder of the session, in which its processes tell each other what is built."""

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
    """The builds of one session: each process makes, or waits for, what its tests need.

    `folder` is the session's own: what one of its processes has finished, the others need not look at.
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
        """Progress goes to a copy of this descriptor."""
        self._terminal = os.dup(terminal)

    def start(self, names: Sequence[str]) -> None:
        """Make them one after the other, in the background."""
        self._thread = threading.Thread(target=self._make_all, args=(tuple(names),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End what is still being built; what was finished stays in the cache."""
        self._stopped = True
        if (running := self._running) is not None:
            running.terminate()
        if self._thread is not None:
            self._thread.join()

    def all_done(self) -> bool:
        """Whether everything that was started is built, or has failed."""
        return (self._folder / "all-built").exists()

    def finish(self, name: str) -> None:
        """Return when it is built, or its build failed. Of two processes that build the same, one waits."""
        if name not in self._errors:
            self._errors[name] = None if self._done(name).exists() else self._make(name)

    def require(self, name: str) -> None:
        """Raises ClusterError with what the build printed if it failed."""
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
        """Run one build to its end; what is wrong with it, or None."""
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
