"""A build blocks only the tests that need it, fails only those, and shows its progress."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.devcluster.cluster import ClusterError
from tests.support.builds import EVERY_S, OF_FIXTURE, STEPS, Builds, Progress, needed
from tests.support.devcluster import wait_until
from tests.support.tiers import TIER_OF_FIXTURE

PROGRAM = """
import sys
from pathlib import Path

folder, *asked = Path(sys.argv[1]), *sys.argv[2:]
name = asked[-1]
with (folder / "log").open("a") as log:
    print(name, file=log)
while not (folder / f"may-{name}").exists():
    pass
print("line of", name, flush=True)
sys.exit(name == "monitoring")
"""


class Site:
    """A builder that builds nothing: it records requests, and ends when it may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM)
        (folder / "session").mkdir()
        self.command = (sys.executable, program, folder)

    def builds(self) -> Builds:
        return Builds(self.folder / "session", command=self.command)

    def allow(self, *names: str) -> None:
        for name in names:
            (self.folder / f"may-{name}").touch()

    def asked(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@contextmanager
def started(builds: Builds, *names: str) -> Iterator[None]:
    builds.start(names)
    try:
        yield
    finally:
        builds.stop()


@pytest.mark.ranks
def test_a_build_blocks_only_who_needs_it(site: Site) -> None:
    site.allow("helm")
    one, other = site.builds(), site.builds()
    with started(one, "helm", "kueue"):
        wait_until(lambda: "kueue" in site.asked(), "the second build")
        one.require("helm")
        other.require("helm")
        assert site.asked() == ["helm", "kueue"], "what one process has built, the other does not ask for"
        assert not one.all_done()
        waiting = threading.Thread(target=lambda: other.require("kueue"))
        waiting.start()
        wait_until(lambda: site.asked().count("kueue") == 2, "the process that needs it to ask")
        assert waiting.is_alive()
        site.allow("kueue")
        waiting.join()
        wait_until(one.all_done, "the background's end")


@pytest.mark.ranks
def test_a_failed_build_fails_those_who_need_it_with_its_output(site: Site) -> None:
    site.allow("monitoring", "helm")
    builds = site.builds()
    with started(builds, "monitoring", "helm"):
        wait_until(builds.all_done, "the builds")
        builds.require("helm")
        for _ in range(2):
            with pytest.raises(ClusterError, match="ended with 1:\nline of monitoring"):
                builds.require("monitoring")
    assert site.asked() == ["monitoring", "helm", "monitoring"], "asked again once, by the test's process"


@pytest.mark.ranks
def test_the_end_of_a_session_ends_a_build(site: Site) -> None:
    builds = site.builds()
    with started(builds, "helm", "kueue"):
        wait_until(lambda: site.asked() == ["helm"], "the first build")
    assert site.asked() == ["helm"]
    assert not builds.all_done()


@pytest.mark.ranks
def test_progress_reaches_the_terminal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.builds.QUIET_S", 0.0)
    reading, writing = os.pipe()
    site.allow("helm")
    builds = site.builds()
    builds.show_on(writing)
    builds.finish("helm")
    assert os.read(reading, 1000) == b"\n[building helm] line of helm\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.unit
def test_a_long_build_reports_its_progress_and_a_short_one_does_not() -> None:
    now = [0.0]
    shown: list[str] = []
    progress = Progress(shown.append, lambda: now[0])
    for second in range(40):
        now[0] = float(second)
        progress.line("node", f"{second} files\n")
    assert shown == [f"\n[building node] {second} files\n" for second in (5, 5 + int(EVERY_S), 35)]


@pytest.mark.unit
def test_fixtures_know_their_builds_and_their_tier() -> None:
    assert OF_FIXTURE.keys() == TIER_OF_FIXTURE.keys()
    assert {build for builds in OF_FIXTURE.values() for build in builds} == STEPS.keys()
    asked = ("tmp_path", "node_cluster", "helm", "control_plane")
    assert needed(asked) == ["node", "image", "helm", "control-plane"]
