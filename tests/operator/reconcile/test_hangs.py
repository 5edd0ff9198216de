"""Table of hangs: what counts as one and what does not, and the way from the alarm to stacks and another
attempt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    NOW,
    Row,
    Want,
    ago,
    check,
    job,
    progress,
    ready,
    restarts,
    run,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.contract.progress import Phase
from zerotrain.operator.reconcile import (
    Action,
    CollectStacks,
    DeleteWorkers,
    Observed,
    Plan,
    StackSource,
    StacksView,
    reconcile,
)
from zerotrain.operator.reconcile.inspection import Inspection, RankPace, SlowRank

pytestmark = pytest.mark.unit


DAY_S = 86_400.0
SUSPECT = SlowRank(rank=1, worker=1, step=40, phase="step", why="its process reports nothing")
COLLECT = CollectStacks(
    attempt=1,
    sources=(
        StackSource(worker=1, pod="gpt-1-1", pod_ip="10.0.0.1"),
        StackSource(worker=0, pod="gpt-1-0", pod_ip="10.0.0.0"),
    ),
)
UNACCUSED: dict[str, Any] = {
    "rank": None,
    "worker": None,
    "pod": "",
    "node": "",
    "message": "no rank stands out",
}
STACKS = StacksView(attempt=1, at=NOW, config_map="gpt-1-stacks")


def active(**more: Any) -> dict[str, Any]:
    """Return the status of an attempt that began a day ago."""
    return status("Running", **{"attemptStartTime": stamp(ago(DAY_S)), **more})


def alarm(s_ago: float, attempt: int = 1, **more: Any) -> dict[str, Any]:
    """Return status.hang as the detection writes it."""
    found = {"attempt": attempt, "detectedAt": stamp(ago(s_ago)), "step": 40, "phase": "step"}
    accused = {"rank": 1, "worker": 1, "pod": "gpt-1-1", "node": "node-1", "message": SUSPECT.why}
    return {**found, "limitSeconds": 300, **accused, **more}


def look(
    idle_s: float = 400,
    *,
    s_ago: float = 0,
    attempt: int = 1,
    accused: SlowRank | None = SUSPECT,
    **paces: RankPace,
) -> Inspection:
    """Return an inspection with every rank idle for so long in phase step, or `paces` by phase."""
    found = {Phase(name): pace for name, pace in paces.items()} or {Phase.STEP: RankPace(idle_s=idle_s)}
    return Inspection(attempt=attempt, at=ago(s_ago), step=40, paces=found, slow_rank=accused)


def both(**more: Any) -> Observed:
    return seen(ready(0), ready(1), **{"progress": progress(40), **more})


def row(
    name: str, observed: Observed, want: Want, *, state: dict[str, Any] | None = None, **policy: Any
) -> Row:
    spec = {"hangPolicy": policy} if policy else {}
    return Row(id=name, job=job(spec=spec, status=state or active()), seen=observed, want=want)


QUIET = Want(phase="Running", actions=(), events=("AllRanksJoined",), fields={"hang": None})
QUIET = replace(QUIET, events=(), conditions={"Hung": None})
ALARM = Want(
    phase="Running",
    attempt=1,
    events=("Hang",),
    actions=(COLLECT,),
    conditions={"Hung": ("True", "Hang"), "Progressing": ("False", "StepStale")},
    fields={"hang.rank": 1, "hang.pod": "gpt-1-1", "hang.node": "node-1", "restarts.total": 0},
    messages={"event": "rank 1 blocks the others: its process reports nothing (pod gpt-1-1, node node-1)"},
    wake_in_s=1,
)
SLOW = RankPace(idle_s=400, usual_s=45, longest_s=60)


def early(first_s: float | None, *, idle_s: float = 300) -> RankPace:
    """Return the pace of the second step of an attempt."""
    return RankPace(idle_s=idle_s, warms_up=True, first_s=first_s)


DETECTION = [
    row("a step that stands still for longer than the limit", both(inspection=look(300)), ALARM),
    row("a second less is none", both(inspection=look(299)), QUIET),
    row(
        "ten times what a step usually takes is the limit of slow steps",
        both(inspection=look(step=SLOW)),
        QUIET,
    ),
    row("and beyond it is a hang", both(inspection=look(step=replace(SLOW, idle_s=450))), ALARM),
    row(
        "twice the longest step of the attempt is none, whatever the percentile says",
        both(inspection=look(step=RankPace(idle_s=1100, usual_s=1, longest_s=600))),
        QUIET,
    ),
    row(
        "as long as few steps are known the first one speaks for them, ten times",
        both(inspection=look(step=early(100, idle_s=999))),
        QUIET,
    ),
    row("and no more", both(inspection=look(step=early(100, idle_s=1000))), ALARM),
    row(
        "at most for what it might have taken",
        both(inspection=look(step=early(400, idle_s=1800))),
        ALARM,
    ),
    row(
        "twice the first step is none in any case",
        both(inspection=look(step=early(1300, idle_s=2599))),
        QUIET,
    ),
    row("beyond that even then", both(inspection=look(step=early(1300, idle_s=2600))), ALARM),
    row("a short first step asks for no patience", both(inspection=look(step=early(5))), ALARM),
    row(
        "where it is not told apart, the next steps may take what it might have",
        both(inspection=look(step=early(None, idle_s=1799))),
        QUIET,
    ),
    row("and then they are a hang", both(inspection=look(step=early(None, idle_s=1800))), ALARM),
    row(
        "by the policy",
        both(inspection=look(step=early(None, idle_s=400))),
        ALARM,
        firstStepTimeoutSeconds=400,
    ),
    row("what comes after the last step is none of them", both(inspection=look(done=early(None))), ALARM),
    row("one rank that moved ends the suspicion", both(inspection=look(0)), QUIET),
    row(
        "a rank in a long checkpoint holds up the others rightly",
        both(inspection=look(step=RankPace(idle_s=1700), checkpoint=RankPace(idle_s=1700))),
        QUIET,
    ),
    row(
        "until the checkpoint exceeds its own limit",
        both(inspection=look(step=RankPace(idle_s=1900), checkpoint=RankPace(idle_s=1900))),
        ALARM,
    ),
    row(
        "checkpoints that take half an hour are learned, too",
        both(inspection=look(checkpoint=RankPace(idle_s=3000, usual_s=1500, longest_s=1500))),
        QUIET,
    ),
    row(
        "loading a checkpoint has the limit of the start",
        both(inspection=look(init=RankPace(idle_s=1799))),
        QUIET,
    ),
    row("and no more", both(inspection=look(init=RankPace(idle_s=1800))), ALARM),
    row(
        "the first step has a limit of its own",
        both(inspection=look(first_step=RankPace(idle_s=1900))),
        QUIET,
        firstStepTimeoutSeconds=3600,
    ),
    row(
        "which is that of the start unless given",
        both(inspection=look(first_step=RankPace(idle_s=100))),
        ALARM,
        startupTimeoutSeconds=100,
    ),
    row("the policy's limit", both(inspection=look(60)), ALARM, minTimeoutSeconds=60),
    row(
        "an attempt that is younger than the limit cannot have exceeded it",
        both(inspection=look(DAY_S)),
        QUIET,
        state=active(attemptStartTime=stamp(ago(299))),
    ),
    row("a look at another attempt", both(inspection=look(attempt=2)), QUIET),
    row("a look that is half a minute old", both(inspection=look(s_ago=31)), QUIET),
    row("the step moved after the look", both(inspection=look(), progress=progress(41)), QUIET),
    row("nobody who reports answered", both(inspection=replace(look(), paces={})), QUIET),
    row(
        "no rank stands out: the hang is none the less",
        both(inspection=look(accused=None)),
        replace(
            ALARM,
            actions=None,
            conditions={"Hung": ("True", "Hang")},
            fields={"hang.rank": None, "hang.worker": None, "hang.pod": "", "hang.node": ""},
            messages={"event": "no rank stands out"},
        ),
    ),
    row(
        "a hang in the window doubles the limit, so that too short a one does not end every attempt",
        both(inspection=look(599)),
        QUIET,
        state=active(restarts=restarts("app", 1800, reason="Hang")),
    ),
    row(
        "one before the window does not",
        both(inspection=look(300)),
        replace(ALARM, fields={"hang.rank": 1}),
        state=active(restarts=restarts("app", 3700, reason="Hang")),
    ),
    row(
        "but not more than four times",
        both(inspection=look(1200)),
        replace(ALARM, fields={"hang.rank": 1}),
        state=active(restarts=restarts("app", 3000, 2000, 1000, 500, reason="Hang")),
    ),
    row(
        "other restarts do not",
        both(inspection=look(300)),
        replace(ALARM, fields={"hang.rank": 1}),
        state=active(restarts=restarts("app", 1800)),
    ),
]

LADDER = [
    row(
        "the stacks are awaited",
        both(inspection=look()),
        Want(phase="Running", events=(), actions=(COLLECT,), wake_in_s=1),
        state=active(hang=alarm(5)),
    ),
    row(
        "the stacks are there, but nobody looked again",
        both(inspection=look(s_ago=5), stacks=STACKS),
        Want(phase="Running", events=(), actions=(), fields={"hang.stacks": "gpt-1-stacks"}),
        state=active(hang=alarm(5)),
    ),
    row(
        "stacks and a second look: another attempt",
        both(inspection=look(), stacks=STACKS),
        Want(
            phase="Restarting",
            events=("Hang",),
            actions=(DeleteWorkers(attempt=1, grace_s=1),),
            fields={
                "restarts.app": 1,
                "failures.0.reason": "Hang",
                "failures.0.rank": 1,
                "failures.0.node": "node-1",
                "failures.0.pod": "gpt-1-1",
                "failures.0.stacks": "gpt-1-stacks",
                "failures.0.cause": "app",
            },
            messages={"event": "no progress for 300 s in phase step; rank 1 blocks the others"},
        ),
        state=active(hang=alarm(5)),
    ),
    row(
        "a rule for hangs may end the job",
        both(inspection=look(), stacks=STACKS),
        Want(phase="Failed", fields={"failures.0.reason": "Hang", "failures.0.stacks": "gpt-1-stacks"}),
        state=active(hang=alarm(5)),
    ),
    row(
        "or leave the node of the accused rank out",
        both(inspection=look(), stacks=STACKS),
        Want(phase="Restarting", fields={"excludedNodes.0.name": "node-1"}),
        state=active(hang=alarm(5)),
    ),
    row(
        "where no rank stands out nobody pays: no node is left out, no rank and no pod is named",
        both(inspection=look(accused=None), stacks=STACKS),
        Want(
            phase="Restarting",
            fields={
                "excludedNodes.0": None,
                "failures.0.rank": None,
                "failures.0.pod": "",
                "failures.0.node": "",
                "failures.0.log": "",
                "failures.0.ranks.0": None,
                "failures.0.stacks": "gpt-1-stacks",
            },
            messages={"event": "there is no node to replace"},
        ),
        state=active(hang=alarm(5, **UNACCUSED)),
    ),
    row(
        "nor does worker 0 of a status from before that was told apart",
        both(inspection=look(accused=None), stacks=STACKS),
        Want(phase="Restarting", fields={"excludedNodes.0": None, "failures.0.pod": ""}),
        state=active(hang=alarm(5, **{**UNACCUSED, "worker": 0, "pod": "gpt-1-0", "node": "node-0"})),
    ),
    row(
        "and no rule about ranks speaks of it",
        both(inspection=look(accused=None), stacks=STACKS),
        Want(phase="Restarting", fields={"failures.0.rule": None}),
        state=active(hang=alarm(5, **UNACCUSED)),
    ),
    row(
        "the third hang in a row is held off for longer, although steps were gained",
        both(inspection=look(1200), stacks=STACKS),
        Want(phase="Restarting", fields={"nextAttemptTime": "2026-01-01T12:00:20Z"}),
        state=active(hang=alarm(5), restarts=restarts("app", 3000, 1500, reason="Hang")),
    ),
    row(
        "stacks that nobody could keep are not waited for",
        both(inspection=look(), stacks=StacksView(attempt=1, at=NOW)),
        Want(phase="Restarting", fields={"failures.0.stacks": ""}),
        state=active(hang=alarm(5)),
    ),
    row(
        "nor are those that do not come",
        both(inspection=look()),
        Want(phase="Restarting"),
        state=active(hang=alarm(60)),
    ),
    row(
        "after a restart of the operator: no look yet, nothing happens",
        both(),
        Want(phase="Running", events=(), actions=(), conditions={"Hung": ("True", "Hang")}),
        state=active(hang=alarm(600)),
    ),
    row(
        "the step advances again",
        both(inspection=None, progress=progress(41)),
        Want(phase="Running", events=("HangOver",), actions=(), fields={"hang": None}),
        state=active(hang=alarm(5)),
    ),
    row(
        "somebody raised the limit meanwhile",
        both(inspection=look()),
        Want(phase="Running", events=("HangOver",), actions=(), fields={"hang": None}),
        state=active(hang=alarm(5)),
        minTimeoutSeconds=3600,
    ),
    row(
        "an alarm of an earlier attempt is not this one's",
        seen(ready(0, 2), ready(1, 2)),
        Want(phase="Running", attempt=2, events=(), actions=(), fields={"hang": None}),
        state=active(attempt=2, hang=alarm(5)),
    ),
    row(
        "stacks of an earlier attempt are not this one's",
        both(inspection=look(), stacks=StacksView(attempt=0, at=NOW, config_map="gpt-0-stacks")),
        Want(phase="Running", actions=(COLLECT,), fields={"hang.stacks": ""}),
        state=active(hang=alarm(5)),
    ),
    row(
        "action Report leaves the attempt alone",
        both(inspection=look(), stacks=STACKS),
        Want(phase="Running", events=(), actions=(), conditions={"Hung": ("True", "Hang")}),
        state=active(hang=alarm(500, stacks="gpt-1-stacks")),
        action="Report",
    ),
    row(
        "an exit code is surer than a hang",
        seen(
            ready(0), replace(ready(1), phase="Failed", exit_code=65, ended_seen_at=ago(5)), inspection=look()
        ),
        Want(phase="Failed"),
        state=active(hang=alarm(60)),
    ),
    row(
        "a job that was asked to suspend is given its grace instead",
        both(inspection=look(), stacks=STACKS),
        Want(phase="Suspending"),
        state=active(hang=alarm(60)),
    ),
]
LADDER[-1].job["spec"]["suspend"] = True


def with_rule(action: str, name: str, **more: Any) -> None:
    """Give the row of that name a failure policy with a rule for hangs."""
    (found,) = [item for item in LADDER if item.id == name]
    found.job["spec"]["failurePolicy"] = {"rules": [{"onReasons": ["Hang"], "action": action, **more}]}


with_rule("FailJob", "a rule for hangs may end the job")
for nobody in ("where no rank stands out nobody", "nor does worker 0"):
    with_rule("ReplaceNodeAndRestart", next(item.id for item in LADDER if item.id.startswith(nobody)))
with_rule("FailJob", "and no rule about ranks speaks of it", onRanks=[0, 1])
with_rule("ReplaceNodeAndRestart", "or leave the node of the accused rank out")


def test_what_was_collected_for_an_earlier_alarm_is_no_evidence_of_this_one() -> None:
    for at, is_evidence in ((ago(1), False), (NOW, True)):
        plan = reconcile(job(status=active()), both(inspection=look(), stacks=replace(STACKS, at=at)), NOW)
        assert plan.status is not None
        assert plan.status.hang is not None or plan.status.failures
        collects = any(isinstance(action, CollectStacks) for action in plan.actions)
        assert collects is not is_evidence


@pytest.mark.parametrize("item", DETECTION, ids=lambda item: item.id)
def test_detection(item: Row) -> None:
    judge(replace(item, job=settled_before(item)))


@pytest.mark.parametrize("item", LADDER, ids=lambda item: item.id)
def test_ladder(item: Row) -> None:
    judge(item)


def judge(item: Row) -> None:
    """Check a row as `check` does, and of its actions only those that a hang leads to."""
    check(replace(item, want=replace(item.want, actions=None)))
    if item.want.actions is not None:
        plan, _ = run(item)
        assert hang_actions(plan) == item.want.actions


def hang_actions(plan: Plan) -> tuple[Action, ...]:
    return tuple(action for action in plan.actions if isinstance(action, CollectStacks | DeleteWorkers))


def settled_before(item: Row) -> dict[str, Any]:
    """Return the job as the pass before the inspection left it, so that a quiet row is one that changes
    nothing.
    """
    return settled(item.job, replace(item.seen, inspection=None, stacks=None))


def test_a_hang_is_reported_once_while_it_lasts() -> None:
    observed = both(inspection=look())
    first = job(status=active(), spec={"hangPolicy": {"action": "Report"}})
    later = settled(first, observed)
    for idle_s in (410, 700, 5000):
        item = Row(id="", job=later, seen=both(inspection=look(idle_s), stacks=STACKS), want=Want(), now=NOW)
        plan, after = run(item)
        assert plan.events == ()
        later = {**later, "status": after}
    plan, _ = run(Row(id="", job=later, seen=both(inspection=look(9000), stacks=STACKS), want=Want()))
    assert plan.status is None, "nothing that changes from look to look is written"


def test_only_32_workers_are_asked_for_stacks_and_the_accused_first() -> None:
    pods = [running(index, ready=True) for index in range(100)]
    accused = replace(SUSPECT, rank=77, worker=77)
    item = Row(
        id="",
        job=job(spec={"workers": 100}, status=active()),
        seen=seen(*pods, inspection=look(accused=accused)),
        want=Want(),
    )
    plan, after = run(item)
    (action,) = hang_actions(plan)
    assert isinstance(action, CollectStacks)
    assert [source.worker for source in action.sources][:3] == [77, 0, 1]
    assert len(action.sources) == 32
    assert after["hang"]["node"] == "node-77"
