"""A peer that ends before an unresponsive node counts as lost: its collective timed out while it waited for
that node.
"""

from __future__ import annotations

import pytest

from tests.operator.reconcile.test_failures_nodes import moving, on, silent
from tests.operator.reconcile_builders import Row, Want, ago, check, ended, progress, ready

pytestmark = pytest.mark.unit


ABORTED = 134
"""Exit code of NCCL's watchdog: a peer's collective did not end."""

ECHOES = [
    on(
        ready(0),
        ended(1, ABORTED, s_ago=1),
        id="a peer ends of a node that is silent already",
        nodes=(silent(0, 50),),
        want=Want(phase="Running", actions=(), events=(), wake_in_s=5),
    ),
    on(
        ready(0),
        ended(1, ABORTED, s_ago=8),
        id="just before the node counts as lost",
        nodes=(silent(0, 57),),
        want=Want(phase="Running", actions=(), events=(), wake_in_s=3),
    ),
    on(
        ready(0),
        ended(1, ABORTED, s_ago=12),
        id="the node is lost then",
        nodes=(silent(0, 61),),
        want=Want(
            phase="Restarting",
            events=("NodeLost",),
            fields={"restarts.infra": 1, "failures.0.pod": "gpt-1-0", "failures.0.reason": "NodeLost"},
        ),
    ),
    on(
        ready(0),
        ended(1, ABORTED, s_ago=6),
        id="its worker answered since: it lives, and the peer ended of itself",
        nodes=(silent(0, 50),),
        last_responses={"node-0": ago(3)},
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.pod": "gpt-1-1"}),
    ),
    on(
        ready(0),
        ended(1, ABORTED, s_ago=6),
        id="what it answered before the end says nothing",
        nodes=(silent(0, 50),),
        last_responses={"node-0": ago(8)},
        want=Want(phase="Running", actions=(), events=(), wake_in_s=5),
    ),
    on(
        ready(0),
        ended(1, ABORTED, s_ago=61),
        id="no longer than a silence lasts, however long the steps are",
        nodes=(silent(0, 100),),
        progress=progress(20, motion=moving(120, longest_step_seconds=600)),
        step_moved_at=ago(120),
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.pod": "gpt-1-1"}),
    ),
    on(
        ready(0),
        ended(1, 137, s_ago=1),
        id="a killed peer is no echo",
        nodes=(silent(0, 50),),
        want=Want(phase="Restarting", fields={"restarts.app": 1, "failures.0.pod": "gpt-1-1"}),
    ),
]


@pytest.mark.parametrize("row", ECHOES, ids=lambda row: row.id)
def test_a_peer_that_ends_before_a_silent_node_counts_as_lost(row: Row) -> None:
    check(row)
