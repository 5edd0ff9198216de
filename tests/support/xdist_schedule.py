"""Order of the test files, and their assignment to the processes of `pytest -n`.

Unit tests come first, so that a mistake shows in the first minute while builds go on. Then one process runs
live tests, which wait more than they compute, and the other processes run tests that compute. All files on a
real node go to one process, one after the other: two nodes on two cores would delay each other, and an
installation of the operator affects the whole cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.support.tiers import TIERS, dearest_in

NODE_FILES = (
    "tests/images/test_images.py",
    "tests/docs/test_quickstart.py",
    "tests/chart/test_chart_node.py",
    "tests/monitoring/test_quickstart_monitoring.py",
    "tests/cluster/test_devcluster_node.py",
)
"""Files that use `node_cluster`, the longest first; tests/conftest.py rejects a file that is missing here."""

LAST_FILE = "tests/operator/live/test_rbac.py"
"""File that checks the requests of the operators of all other tests."""

NODE = "node"


class ByCluster(LoadFileScheduling):  # type: ignore[misc]
    """A scheduler that gives whole files to a process, and all files of the node together."""

    def __init__(self, config: Any, log: Any, *, built: Callable[[], bool]) -> None:
        super().__init__(config, log)
        self._built = built
        self._tiers: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        path = str(super()._split_scope(nodeid))
        return NODE if path in NODE_FILES else path

    def _assign_work_unit(self, node: Any) -> None:
        live = any(
            self._pending_of({scope: tests}) and self._is_live(scope)
            for other, work in self.assigned_work.items()
            if other is not node
            for scope, tests in work.items()
        )
        chosen = choose(list(self.workqueue), self._tier, live_elsewhere=live, built=self._built())
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        others = (work for other, work in self.assigned_work.items() if other is not node)
        # A process keeps its last test until it gets more tests, or the message that there are no more.
        if list(self.workqueue) == [LAST_FILE] and any(self._pending_of(work) > 1 for work in others):
            return
        super()._reschedule(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        # Another process may take the last file now; the others then get the message that there are no more.
        for each in (*self.nodes, *self.nodes) if list(self.workqueue) == [LAST_FILE] else ():
            self._reschedule(each)

    def _is_live(self, scope: str) -> bool:
        return is_live(self._tier(scope))

    def _tier(self, scope: str) -> str:
        if scope not in self._tiers:
            self._tiers[scope] = NODE if scope == NODE else dearest_in(Path(self.config.rootpath, scope))
        return self._tiers[scope]


def is_live(tier: str) -> bool:
    return TIERS.index(tier) >= TIERS.index("cluster")


def choose(
    waiting: Sequence[str], tier_of: Callable[[str], str], *, live_elsewhere: bool, built: bool
) -> str:
    """Return the next file for a process, given the ordered waiting files and the work of others.

    The node's files begin before other live ones, as they take longest. No process waits for a build while
    there are tests that compute.
    """
    if tier_of(waiting[0]) == TIERS[0]:
        return waiting[0]
    live = [name for name in waiting if is_live(tier_of(name)) and name != LAST_FILE]
    computing = [name for name in waiting if not is_live(tier_of(name))]
    if NODE in live:
        live = [NODE]
    prefer_live = built and not live_elsewhere
    return next(iter([*live, *computing] if prefer_live else [*computing, *live]), waiting[0])


def place(name: str, tier: int) -> tuple[int, int]:
    """Return the position of a file in the order; files of equal position stay in the order of collection."""
    if name in NODE_FILES:
        return TIERS.index(NODE), NODE_FILES.index(name)
    return tier, 0
