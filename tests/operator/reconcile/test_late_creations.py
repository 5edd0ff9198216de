"""A new operator gives the pods that its predecessor requested time to appear before it goes on without
them.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.operator.reconcile_builders import NOW, ago, job, seen, status
from zerotrain.operator.reconcile import reconcile
from zerotrain.operator.reconcile.teardown import LATE_CREATIONS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("synced_s_ago", "created", "phase"),
    [(0.5, False, "Restarting"), (0.5, True, "Pending"), (2.5, False, "Pending")],
)
def test_the_next_attempt_waits_for_pods_that_may_still_appear(
    synced_s_ago: float, created: bool, phase: str
) -> None:
    ended = job(status=status("Restarting", 1, podsCreated=created))
    synced = ago(synced_s_ago)
    plan = reconcile(ended, seen(synced_at=synced), NOW)
    assert plan.status is not None
    assert plan.status.phase == phase
    if phase == "Restarting":
        assert plan.wake_at == synced + LATE_CREATIONS
        later = reconcile(ended, seen(synced_at=synced), NOW + timedelta(seconds=2))
        assert later.status is not None
        assert later.status.attempt == 2
