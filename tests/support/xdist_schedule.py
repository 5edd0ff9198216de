"""Which tests run when, and in which process of `pytest -n`.

Unit tests come first, so that a mistake is known in the first minute and builds go on meanwhile. Then one
process has files that compute and another live ones, which wait more than they compute. All files on a real
node go to one process, one after the other: two nodes on two cores would make each other late, and an
installation of the operator is the whole cluster's.
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
"""What uses `node_cluster`, the longest first; tests/conftest.py refuses a file that is missing here."""

LAST_FILE = "tests/operator/test_operator_rbac.py"
"""Judges what the operators of all other tests did."""

NODE = "node"


class ByCluster(LoadFileScheduling):  # type: ignore[misc]
    """A process gets whole files, and all of the node's at once."""

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
        # A process keeps its last test until it gets more, or hears that there is no more.
        if list(self.workqueue) == [LAST_FILE] and any(self._pending_of(work) > 1 for work in others):
            return
        super()._reschedule(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        # Somebody may take the last file now, and then the others hear that there is no more.
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
    """The next file for a process: of those that wait, which are in order, and beside what others run.

    The node's files begin before other live ones, as they are the longest piece of all. Nobody begins to
    wait for a build while there is something to compute.
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
    """Where a file comes among all; files of the same place stay in the order in which they were found."""
    if name in NODE_FILES:
        return TIERS.index(NODE), NODE_FILES.index(name)
    return tier, 0
