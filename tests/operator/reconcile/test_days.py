"""Days of a job's life on a bad cluster: in any order of events, every attempt has its reason.

Each history ends with a quiet hour, in which the job must be running, and with the end of its last step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from tests.operator.simulated_cluster import TOTAL, DayWorld

pytestmark = pytest.mark.ranks


SECOND = timedelta(seconds=1)
HOURS = 24
SEEDS = (1, 2, 3, 4)
"""Seeds of CI's histories; `make chaos` runs more."""

PAUSES_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1500.0)
"""Seconds between two events: storms and long calms."""

ALWAYS_UP_S = 1500.0
"""Seconds without an event after which a job that may run does run."""


def rank_fails(world: DayWorld) -> None:
    up = [pod for pod in world.pods.values() if pod.started and not pod.ended]
    up = [pod for pod in up if world.machines[str(pod.node)].ready]
    if up:
        world.excuses += 1
        world.end(world.chance.choice(up), world.chance.choice((1, 82, 137)))


def pod_is_deleted(world: DayWorld) -> None:
    if world.pods:
        world.excuses += 1
        world.delete(world.chance.choice(list(world.pods.values())), world.chance.choice((0, 1, 30)))


def pod_is_evicted(world: DayWorld) -> None:
    up = [pod for pod in world.pods.values() if pod.started and not pod.ended]
    if up:
        world.excuses += 1
        pod = replace(world.chance.choice(up), disruption="EvictionByEvictionAPI")
        world.delete(pod, 60)


def node_dies(world: DayWorld) -> None:
    alive = [machine for machine in world.machines.values() if machine.ready]
    if len(alive) > 1:
        world.excuses += 3  # a loss, perhaps a smaller attempt, and one that grows again
        machine = world.chance.choice(alive)
        machine.alive, machine.not_ready_since = False, world.now
        world.wake_at = world.now  # as the watch of nodes does


def node_returns(world: DayWorld) -> None:
    for machine in world.machines.values():
        if not machine.alive:
            world.excuses += 2
            machine.alive, machine.not_ready_since = True, None
            world.wake_at = world.now
            return


def kubelet_falls_silent(world: DayWorld) -> None:
    """Restart or upgrade a kubelet: its pods run on, and give no reason for another attempt."""
    up = [machine for machine in world.machines.values() if machine.ready]
    if len(up) > 1:
        world.chance.choice(up).not_ready_since = world.now
        world.wake_at = world.now


def kubelets_are_back(world: DayWorld) -> None:
    for machine in world.machines.values():
        if machine.alive and machine.not_ready_since is not None:
            machine.not_ready_since = None
            world.wake_at = world.now


def node_is_cordoned(world: DayWorld) -> None:
    open_ = [machine for machine in world.machines.values() if machine.open]
    if len(open_) > 1:
        world.excuses += 3
        world.chance.choice(open_).cordoned = True
        world.wake_at = world.now


def node_is_opened(world: DayWorld) -> None:
    for machine in world.machines.values():
        if machine.cordoned:
            world.excuses += 2
            machine.cordoned = False
            world.wake_at = world.now
            return


def suspend(world: DayWorld) -> None:
    world.edit(suspend=True)


def resume(world: DayWorld) -> None:
    if world.job["spec"].get("suspend"):
        world.excuses += 1
        world.edit(suspend=False)


def resize(world: DayWorld) -> None:
    world.excuses += 2
    world.edit(workers=world.chance.choice((1, 2, 4)))


def operator_dies(world: DayWorld) -> None:
    world.run_operator(dies_after=world.chance.randrange(3))


def operator_is_away(world: DayWorld) -> None:
    """Stop the operator for a while; the cluster goes on."""
    world.wake_at = None
    world.lagging = True
    for _ in range(5):
        world.now += world.chance.choice((1, 20)) * SECOND
        world.live()
    world.restart_operator()


def watch_lags(world: DayWorld) -> None:
    world.lagging = True
    world.pass_time(world.chance.choice((1, 5)))
    world.lagging = False


def write_is_lost(world: DayWorld) -> None:
    world.run_operator(loses=world.chance.choice(("refused", "unanswered")))


HAPPENINGS: tuple[tuple[Callable[[DayWorld], None], int], ...] = (
    (rank_fails, 4),
    (pod_is_deleted, 3),
    (pod_is_evicted, 3),
    (node_dies, 2),
    (node_returns, 4),
    (kubelet_falls_silent, 3),
    (kubelets_are_back, 5),
    (node_is_cordoned, 2),
    (node_is_opened, 4),
    (suspend, 3),
    (resume, 6),
    (resize, 2),
    (operator_dies, 6),
    (operator_is_away, 2),
    (watch_lags, 3),
    (write_is_lost, 4),
)


def live_through(seed: int, hours: float = HOURS) -> DayWorld:
    """Play one history, from the first pod to the end of the job."""
    chance = random.Random(seed)
    world = DayWorld(chance)
    acts, weights = zip(*HAPPENINGS, strict=True)
    end = world.now + timedelta(hours=hours)
    lines: list[str] = []
    try:
        while world.now < end:
            act = chance.choices(acts, weights)[0]
            lines.append(
                f"{world.now:%d %H:%M:%S} {act.__name__}, {world.status.get('phase')} {world.attempt}"
            )
            act(world)
            pause_s = chance.choice(PAUSES_S)
            world.pass_time(pause_s)
            if pause_s >= ALWAYS_UP_S:
                check_that_it_runs(world)
        come_to_rest(world)
    except AssertionError as error:
        lately = "\n".join(lines[-25:])
        raise AssertionError(f"seed {seed}: {error}\n{lately}") from error
    return world


def check_that_it_runs(world: DayWorld) -> None:
    """Check that a job that may run does run after a long calm, with at least one node up."""
    due = world.status.get("nextAttemptTime")
    held_off = due is not None and datetime.fromisoformat(due) > world.now
    no_capacity = not any(machine.open for machine in world.machines.values())
    if world.job["spec"].get("suspend") or held_off or no_capacity:
        return
    assert world.status["phase"] == "Running", f"does not run after a long calm: {world.describe()}"
    up = [pod for pod in world.pods.values() if pod.started and not pod.ended]
    assert len(up) == world.status["shape"]["workers"], f"workers are missing: {world.describe()}"
    program = world.programs[world.attempt]
    assert not program.broken, f"ranks wait for peers that never come: {world.describe()}"


def come_to_rest(world: DayWorld) -> None:
    """Play a quiet hour, then the last step: the job runs, stays, and ends."""
    for machine in world.machines.values():
        machine.alive, machine.cordoned, machine.not_ready_since = True, False, None
    if world.job["spec"].get("suspend"):
        world.edit(suspend=False)
    world.excuses += 4
    world.pass_time(3600)
    check_that_it_runs(world)
    attempt, writes = world.attempt, world.writes
    world.pass_time(3600)
    assert world.attempt == attempt, f"an attempt ended in quiet: {world.describe()}"
    assert world.writes - writes <= 3600 / 25, "status is written again and again"
    world.programs[attempt].step = TOTAL
    for pod in list(world.pods.values()):
        world.end(pod, 0)
    world.pass_time(600)
    assert world.status["phase"] == "Completed", world.describe()
    assert len(world.budgets) == 0, f"disruption budgets are left: {world.budgets}"
    passes = world.passes
    world.pass_time(3600)
    assert world.passes == passes, "a job that is over gives no peace"


QUIET = (kubelet_falls_silent, kubelets_are_back, operator_dies, operator_is_away, watch_lags, write_is_lost)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_day_of_kubelets_and_operators_that_are_away_starts_no_second_attempt(seed: int) -> None:
    chance = random.Random(seed)
    world = DayWorld(chance)
    world.pass_time(300)
    check_that_it_runs(world)
    end, silences = world.now + timedelta(hours=HOURS), 0
    while world.now < end:
        act = chance.choice(QUIET)
        silences += act is kubelet_falls_silent
        act(world)
        world.pass_time(chance.choice(PAUSES_S))
        assert (world.attempt, world.status.get("failures")) in ((1, None), (1, [])), world.describe()
    assert silences > 10
    kubelets_are_back(world)
    come_to_rest(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_day(seed: int) -> None:
    world = live_through(seed)
    assert world.attempt > 10
