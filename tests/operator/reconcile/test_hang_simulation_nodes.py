"""Twenty-four hours of slow steps, long checkpoints and long starts on nodes whose kubelets are restarted and
upgraded (NotReady for up to two minutes), with an API server that goes away for minutes: no alarm.

A node that dies in the middle of such a day is found in time and named.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.operator.flaky_nodes import NODES, PATIENCE_S, Site
from tests.operator.reconcile.test_hang_simulation import DAY_S
from zerotrain.contract.progress import Phase
from zerotrain.operator.cluster import progress_poller

pytestmark = pytest.mark.ranks


SILENT_AFTER_S = 40
"""Seconds after its last heartbeat at which the node controller sets a node NotReady."""

BLIP_S = (10.0, 120.0)
PAUSE_S = (60.0, 900.0)
"""Range of the seconds between two disturbances."""


@pytest.fixture(autouse=True)
def _asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll at the interval of three thousand running jobs."""
    monkeypatch.setattr(progress_poller, "MIN_INTERVAL_S", 30.0)


def kubelet_is_away(site: Site) -> None:
    """Take one kubelet away, for a restart or an upgrade; its pods run on.

    A kubelet that pulls an image for the job is left alone: a worker that has not started has no other sign
    of life.
    """
    waits = site.job["status"]["phase"] == "Pending"
    name = NODES[0] if waits else site.chance.choice(NODES)
    site.say(name, ready=False)
    site.go_on(site.now + site.chance.uniform(*BLIP_S))
    site.say(name, ready=True)


def node_is_cut_off(site: Site) -> None:
    """Cut a node off from the control plane and from the operator, not from its peers.

    Only while steps are made: their duration is known, and shows that the ranks are alive.
    """
    if site.ranks.phase is not Phase.STEP or site.ranks.step <= 5:
        return
    site.blips["cut off"] += 1
    site.cut_off.add(NODES[1])
    kubelet_is_away(site)
    site.cut_off.clear()


def api_server_is_away(site: Site) -> None:
    """Take the API server away. When it is back, all nodes have been NotReady for longer than the policy
    allows, until their kubelets come through: first the conditions, then the answers.
    """
    waits = site.job["status"]["phase"] == "Pending"
    site.away_until = site.now + site.chance.uniform(50, 300)
    site.go_on(site.now + SILENT_AFTER_S)
    names = NODES[:1] if waits else NODES
    for name in names:
        site.say(name, ready=False)
    site.go_on(site.away_until)
    for name in names:
        site.hear(name)
    site.go_on(site.now + site.chance.uniform(1, 40))
    for name in names:
        site.say(name, ready=True)


def day(seed: int) -> Iterator[Site]:
    """Yield the site of one day, between its events."""
    chance = random.Random(seed)
    site = Site(chance)
    site.start(1)
    restart_at = chance.uniform(2, 5) * 3600
    while site.now < DAY_S:
        site.go_on(site.now + chance.uniform(*PAUSE_S))
        if site.now >= restart_at:
            restart_at += chance.uniform(2, 5) * 3600
            site.start(site.ranks.attempt + 1)
            site.go_on(site.now + chance.uniform(1, 60))
        chance.choice((kubelet_is_away, kubelet_is_away, node_is_cut_off, api_server_is_away))(site)
        yield site


def test_a_day_of_kubelets_and_api_servers_that_come_and_go_gives_no_alarm() -> None:
    for site in day(2):
        assert site.has_reported <= {"AllRanksJoined"}, site.events[-1]
    assert site.ranks.attempt >= 4, "restarts that somebody wanted are part of the day"
    wanted = {"Pending", "Running", "cut off", Phase.INIT, Phase.FIRST_STEP, Phase.STEP, Phase.CHECKPOINT}
    missing = {str(phase) for phase in wanted} - site.blips.keys()
    assert not missing, f"too easy: no long blip while {missing}; {site.blips}"


@pytest.mark.parametrize(
    ("phase", "most_s"),
    [
        (Phase.INIT, 2 * PATIENCE_S),
        (Phase.STEP, 3600 + PATIENCE_S),
        (Phase.CHECKPOINT, 3600 + PATIENCE_S),
    ],
)
def test_a_node_that_dies_in_such_a_day_is_found_in_time_and_named(phase: Phase, most_s: float) -> None:
    for site in day(5):
        lately = site.ranks.step > 5 or phase is Phase.INIT
        if site.ranks.phase is phase and lately and site.job["status"]["phase"] == "Running":
            break
    motion = site.ranks.trackers[0].motion(site.now)
    writes = phase is Phase.CHECKPOINT
    longest_s = (motion.longest_checkpoint_seconds if writes else motion.longest_step_seconds) or 0.0
    died_at = site.now
    site.dead.add("node-1")
    site.go_on(site.now + SILENT_AFTER_S)
    site.say("node-1", ready=False)
    while not site.has_reported & {"NodeLost", "Hang"} and site.now < died_at + most_s:
        site.go_on(site.now + 10)
    found_at, reason, message = site.events[-1]
    assert (reason, "node-1" in message) == ("NodeLost", True), message
    assert found_at - died_at <= SILENT_AFTER_S + max(PATIENCE_S, 2 * longest_s) + PATIENCE_S
    (failure, *_) = site.job["status"]["failures"]
    assert (failure["reason"], failure["node"]) == ("NodeLost", "node-1")
