"""Order in which the processes of `pytest -n` get test files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.tiers import TIERS
from tests.support.xdist_schedule import LAST_FILE, NODE, NODE_FILES, ByCluster, choose, place

pytestmark = pytest.mark.unit


def tier_of(name: str) -> str:
    """Return the tier in names such as `ranks-2`."""
    return "cluster" if name == LAST_FILE else name.partition("-")[0]


@pytest.mark.parametrize(
    ("waiting", "live_elsewhere", "built", "chosen"),
    [
        (["unit-1", "ranks-1", "cluster-1"], False, True, "unit-1"),
        (["ranks-1", "cluster-1", NODE, "tools-1"], False, True, NODE),
        (["ranks-1", "cluster-1", "tools-1"], False, True, "cluster-1"),
        (["ranks-1", "cluster-1"], True, True, "ranks-1"),
        (["ranks-1", "cluster-1"], False, False, "ranks-1"),
        (["cluster-1", "tools-1"], True, False, "cluster-1"),
        (["ranks-1", "ranks-2"], False, True, "ranks-1"),
        (["ranks-1", LAST_FILE], False, True, "ranks-1"),
        ([LAST_FILE], True, True, LAST_FILE),
    ],
)
def test_the_next_file(waiting: list[str], live_elsewhere: bool, built: bool, chosen: str) -> None:
    assert choose(waiting, tier_of, live_elsewhere=live_elsewhere, built=built) == chosen


def test_cheap_files_come_first_and_the_nodes_together() -> None:
    names = [*NODE_FILES, "tests/a.py", "tests/b.py"]
    tiers = {**dict.fromkeys(NODE_FILES, "tools"), "tests/a.py": "tools", "tests/b.py": "unit"}
    ordered = sorted(set(names), key=lambda name: place(name, TIERS.index(tiers[name])))
    assert ordered == ["tests/b.py", *NODE_FILES, "tests/a.py"]


class Process:
    """xdist's view of a worker: it keeps its last test until it gets more or is shut down."""

    def __init__(self, name: str) -> None:
        self.name, self.queue, self.shutting_down = name, list[int](), False
        self.gateway = self

    @property
    def id(self) -> str:
        return self.name

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next(self) -> int | None:
        return self.queue[0] if len(self.queue) > 1 or (self.queue and self.shutting_down) else None


class Config:
    """The part of pytest's configuration that the scheduler reads."""

    def __init__(self, root: Path, processes: int) -> None:
        self.rootpath, self.option, self._processes = root, self, processes
        self.loadscopereorder = False

    def getvalue(self, _: str) -> list[str]:
        return [f"{self._processes}*popen"]


def session(root: Path, tests: list[str], *, processes: int, seed: int) -> list[tuple[str, str]]:
    """Return (worker, test) in the order in which the tests end; each test takes a random time."""
    scheduler = ByCluster(Config(root, processes), None, built=lambda: True)
    workers = [Process(str(number)) for number in range(processes)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    chance, done = random.Random(seed), list[tuple[str, str]]()
    while ready := [worker for worker in workers if worker.next() is not None]:
        worker = chance.choice(ready)
        index = worker.queue.pop(0)
        done.append((worker.name, tests[index]))
        scheduler.mark_test_complete(worker, index)
        if scheduler.tests_finished:
            for each in workers:
                each.shutdown()
    return done


FILES = {
    **{f"tests/test_unit_{number}.py": "unit" for number in range(3)},
    **{f"tests/test_ranks_{number}.py": "ranks" for number in range(3)},
    **{f"tests/test_cluster_{number}.py": "cluster" for number in range(3)},
    **dict.fromkeys(NODE_FILES, "node"),
    LAST_FILE: "cluster",
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_session(tmp_path: Path, processes: int, seed: int) -> None:
    for name, tier in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"pytestmark = pytest.mark.{tier}")
    tests = [f"{name}::test_{number}" for name in FILES for number in range(1 + seed % 3)]
    done = session(tmp_path, tests, processes=processes, seed=seed)
    assert sorted(name for _, name in done) == sorted(tests), "every test runs once"
    runs: dict[str, set[str]] = {}
    for worker, name in done:
        runs.setdefault(name.split("::")[0], set()).add(worker)
    assert {len(workers) for workers in runs.values()} == {1}, "a file stays in one process"
    assert len(set().union(*(runs[name] for name in NODE_FILES))) == 1, "one process has the node"
    last = next(place for place, (_, name) in enumerate(done) if name.startswith(LAST_FILE))
    late = [name for _, name in done[last:] if not name.startswith(LAST_FILE)]
    assert len(late) < processes, "all others are done, but for the test that each other process is in"
