"""Which tests run when, and in which process of `pytest -n`.

Live files come first: they wait more than they compute, a build that fails is known early, and what remains
to the end is short. All files on a real node go to one process, one after the other: two nodes on two cores
would make each other late, and an installation of the operator is the whole cluster's.
"""

from __future__ import annotations

from pathlib import Path

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

NODE_FILES = (
    "tests/images/test_images.py",
    "tests/docs/test_quickstart.py",
    "tests/chart/test_chart_node.py",
    "tests/monitoring/test_quickstart_monitoring.py",
    "tests/cluster/test_devcluster_node.py",
)
"""What uses `node_cluster`, the longest first; tests/conftest.py refuses a file that is missing here."""


class ByCluster(LoadFileScheduling):  # type: ignore[misc]
    """A process gets whole files in the order in which they were collected, and all of the node's at once."""

    def _split_scope(self, nodeid: str) -> str:
        path = str(super()._split_scope(nodeid))
        return "node" if path in NODE_FILES else path


def rank(path: Path, root: Path, *, live: bool) -> int:
    """Place of a file among all; files of the same rank stay in the order in which they were found."""
    name = path.relative_to(root).as_posix()
    if name in NODE_FILES:
        return NODE_FILES.index(name)
    return len(NODE_FILES) if live else len(NODE_FILES) + 1
