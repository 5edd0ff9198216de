"""Which tests run when, and in which process of `pytest -n`.

Cheap files come first, so that a mistake is known in the first minute and builds go on meanwhile. All files
on a real node go to one process, one after the other: two nodes on two cores would make each other late, and
an installation of the operator is the whole cluster's.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.support.tiers import TIERS

NODE_FILES = (
    "tests/images/test_images.py",
    "tests/docs/test_quickstart.py",
    "tests/chart/test_chart_node.py",
    "tests/monitoring/test_quickstart_monitoring.py",
    "tests/cluster/test_devcluster_node.py",
)
"""What uses `node_cluster`, the longest first; tests/conftest.py refuses a file that is missing here."""

NODE = TIERS.index("node")


class ByCluster(LoadFileScheduling):  # type: ignore[misc]
    """A process gets whole files in the order in which they were collected, and all of the node's at once."""

    def _split_scope(self, nodeid: str) -> str:
        path = str(super()._split_scope(nodeid))
        return "node" if path in NODE_FILES else path


def place(name: str, tier: int) -> tuple[int, int]:
    """Where a file comes among all; files of the same place stay in the order in which they were found."""
    if name in NODE_FILES:
        return NODE, NODE_FILES.index(name)
    return tier, 0
