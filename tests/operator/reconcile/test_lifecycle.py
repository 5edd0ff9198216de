"""Table of `reconcile` from creation to completion: attempts, pods, phases, counts, clean-up, deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.operator.reconcile_builders import (
    ALL,
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    last_words,
    pending,
    progress,
    ready,
    running,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.contract.progress import Phase as RankPhase
from zerotrain.operator.reconcile import CreateWorkers, DeleteJob, DeletePods, DeleteWorkers, Problem

pytestmark = pytest.mark.unit


START = [
    Row(
        id="a new job gets attempt 1 in status before its pods",
        job=job(),
        seen=seen(),
        want=Want(
            phase="Pending",
            attempt=1,
            actions=(CreateWorkers(attempt=1, indices=ALL),),
            conditions={"Ready": ("False", "CreatingPods"), "Reconciling": ("True", "CreatingPods")},
            fields={
                "podsCreated": False,
                "workers.desired": 2,
                "zeroStage": 3,
                "startTime": None,
            },
            writes=True,
        ),
    ),
    Row(
        id="after a crash between status and pods the same attempt's pods are made",
        job=job(status=status("Pending", podsCreated=False)),
        seen=seen(),
        want=Want(attempt=1, actions=(CreateWorkers(attempt=1, indices=ALL),)),
    ),
    Row(
        id="after a crash in the middle of creation only the missing pods are made",
        job=job(status=status("Pending", podsCreated=False)),
        seen=seen(pending(0)),
        want=Want(attempt=1, phase="Pending", actions=(CreateWorkers(attempt=1, indices=(1,)),)),
    ),
    Row(
        id="all pods exist: remembered, so that a missing one is lost from now on",
        job=job(status=status("Pending", podsCreated=False)),
        seen=seen(pending(0), pending(1)),
        want=Want(phase="Pending", actions=(), fields={"podsCreated": True}),
    ),
    Row(
        id="pods run but the ranks have not met",
        job=job(status=status("Pending")),
        seen=seen(running(0), running(1)),
        want=Want(
            phase="Starting",
            actions=(),
            conditions={
                "PodsScheduled": ("True", "AllScheduled"),
                "RendezvousComplete": ("False", "WaitingForRanks"),
                "Ready": ("False", "WaitingForRanks"),
            },
            fields={"workers.running": 2, "workers.summary": "0/2"},
        ),
    ),
    Row(
        id="one pod ready is not enough",
        job=job(status=status("Pending")),
        seen=seen(ready(0), running(1)),
        want=Want(phase="Starting", fields={"workers.ready": 1}),
    ),
    Row(
        id="all ranks joined",
        job=job(status=status("Starting")),
        seen=seen(ready(0), ready(1)),
        want=Want(
            phase="Running",
            events=("AllRanksJoined",),
            conditions={
                "Ready": ("True", "AllRanksJoined"),
                "Reconciling": ("False", "AllRanksJoined"),
                "RendezvousComplete": ("True", "AllRanksJoined"),
                "Progressing": ("False", "NoStepYet"),
            },
        ),
    ),
    Row(
        id="ranks are counted by ranksPerWorker",
        job=job(spec={"ranksPerWorker": 4}, status=status("Starting")),
        seen=seen(ready(0), running(1)),
        want=Want(fields={"ranks.desired": 8, "ranks.running": 8, "ranks.ready": 4, "workers.desired": 2}),
    ),
    Row(
        id="a short loss of readiness does not take the job back to Starting",
        job=job(status=status("Running")),
        seen=seen(ready(0), running(1)),
        want=Want(phase="Running", actions=(), fields={"workers.ready": 1}),
    ),
    Row(
        id="an unschedulable pod is named with the scheduler's words",
        job=job(status=status("Pending")),
        seen=seen(
            pending(0, scheduled=True),
            pending(1, unscheduled_reason="Unschedulable: 0/3 nodes: no nvidia.com/gpu"),
        ),
        want=Want(
            conditions={"PodsScheduled": ("False", "Unschedulable")},
            messages={"PodsScheduled": "worker 1 (pod gpt-1-1): Unschedulable: 0/3 nodes: no nvidia.com/gpu"},
        ),
    ),
    Row(
        id="a container that cannot start is named",
        job=job(status=status("Pending")),
        seen=seen(
            pending(0, waiting="ErrImagePull: not found"), pending(1, waiting="ErrImagePull: not found")
        ),
        want=Want(
            phase="Pending",
            conditions={"Reconciling": ("True", "ContainerWaiting")},
            messages={"Reconciling": "worker 0 (pod gpt-1-0): ErrImagePull: not found (and 1 more)"},
        ),
    ),
    Row(
        id="what the API server refused is shown",
        job=job(status=status("Pending", podsCreated=False)),
        seen=seen(problem=Problem(reason="QuotaExceeded", message="pods: used 10, limited to 10")),
        want=Want(
            actions=(CreateWorkers(attempt=1, indices=ALL),),
            conditions={"Reconciling": ("True", "QuotaExceeded")},
            messages={"Reconciling": "limited to 10"},
        ),
    ),
]

PROGRESS = [
    Row(
        id="progress of this attempt is taken over",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), progress=progress(40, saved=20, loss=2.5, resumed_from=20)),
        want=Want(
            fields={
                "progress.step": 40,
                "progress.loss": 2.5,
                "checkpoint.last.step": 20,
                "checkpoint.last.durable": True,
                "checkpoint.resumedFromStep": 20,
            },
            conditions={
                "Progressing": ("True", "StepAdvanced"),
                "CheckpointDurable": ("True", "CheckpointDurable"),
            },
        ),
    ),
    Row(
        id="progress of an earlier attempt never counts",
        job=job(status=status("Running", attempt=2)),
        seen=seen(ready(0, 2), ready(1, 2), progress=progress(40, attempt=1, saved=20)),
        want=Want(
            fields={"progress.step": 0, "checkpoint.last": None},
            conditions={"Progressing": ("False", "NoStepYet")},
        ),
    ),
    Row(
        id="after a damaged checkpoint the newest is the one taken last, not the one with the highest step",
        job=job(
            status=status(
                "Running",
                attempt=2,
                checkpoint={"last": {"step": 60, "time": stamp(ago(100)), "durable": True}},
            )
        ),
        seen=seen(ready(0, 2), ready(1, 2), progress=progress(45, attempt=2, saved=40)),
        want=Want(fields={"checkpoint.last.step": 40}),
    ),
    Row(
        id="of a job whose workers cannot be reached nobody knows whether it moves",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), progress=progress(40), unresponsive=True),
        want=Want(
            fields={"progress.step": 40},
            conditions={"Progressing": ("Unknown", "WorkersUnreachable")},
            messages={"Progressing": "open TCP 8471"},
        ),
    ),
    Row(
        id="a loss that is no number is left out: the status must stay writable",
        job=job(status=status("Running")),
        seen=seen(ready(0), ready(1), progress=progress(40, loss=float("nan"))),
        want=Want(fields={"progress.step": 40, "progress.loss": None}),
    ),
    Row(
        id="a new attempt that has not loaded its checkpoint does not show step 0",
        job=job(status=status("Starting", attempt=2, progress={"attempt": 1, "step": 60, "totalSteps": 100})),
        seen=seen(
            running(0, 2), running(1, 2), progress=progress(0, attempt=2, phase=RankPhase.INIT, total_steps=0)
        ),
        want=Want(fields={"progress.step": 60, "progress.attempt": 2, "progress.totalSteps": 100}),
    ),
    Row(
        id="the last steps, after the last poll, are learned from the pods' last words",
        job=job(status=status("Running", progress={"attempt": 1, "step": 96, "totalSteps": 100})),
        seen=seen(ended(0, 0, termination=replace(last_words(0), step=100)), ended(1, 0)),
        want=Want(phase="Completed", fields={"progress.step": 100}, messages={"event": "after 100 steps"}),
    ),
]

END = [
    Row(
        id="all pods succeeded",
        job=job(status=status("Running")),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(
            phase="Completed",
            actions=(),
            events=("Completed",),
            conditions={
                "Complete": ("True", "Completed"),
                "Ready": ("True", "Completed"),
                "Failed": None,
            },
            fields={"completionTime": "2026-01-01T12:00:00Z"},
        ),
    ),
    Row(
        id="one pod succeeded, the other still runs",
        job=job(status=status("Running")),
        seen=seen(ended(0, 0), ready(1)),
        want=Want(phase="Running", actions=()),
    ),
    Row(
        id="a succeeded pod that somebody deleted afterwards still counts",
        job=job(status=status("Running")),
        seen=seen(ended(1, 0), gone=(ended(0, 0),)),
        want=Want(phase="Completed"),
    ),
    Row(
        id="the last checkpoint is learned from the pods' last words",
        job=job(status=status("Running")),
        seen=seen(ended(0, 0, termination=last_words(0, step=100)), ended(1, 0)),
        want=Want(phase="Completed", fields={"checkpoint.last.step": 100}),
    ),
    Row(
        id="cleanPodPolicy All takes the pods of a completed job",
        job=job(spec={"runPolicy": {"cleanPodPolicy": "All"}}, status=status("Completed")),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(phase="Completed", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
    ),
    Row(
        id="cleanPodPolicy Running keeps ended pods",
        job=job(status=status("Completed")),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(actions=()),
    ),
    Row(
        id="a finished job whose pods are gone stays finished",
        job=job(status=status("Completed")),
        seen=seen(),
        want=Want(phase="Completed", attempt=1, actions=()),
    ),
    Row(
        id="a failed job ends the ranks that still run, by name, and keeps the failed one",
        job=job(status=status("Failed")),
        seen=seen(ended(0, 65), ready(1)),
        want=Want(phase="Failed", actions=(DeletePods(names_uids=(("gpt-1-1", "pod-1-1"),), grace_s=1),)),
    ),
    Row(
        id="time to live is waited for",
        job=job(
            spec={"runPolicy": {"ttlSecondsAfterFinished": 60}},
            status=status("Completed", completionTime=stamp(ago(20))),
        ),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(actions=(), wake_in_s=40),
    ),
    Row(
        id="after the time to live the job is deleted",
        job=job(
            spec={"runPolicy": {"ttlSecondsAfterFinished": 60}},
            status=status("Completed", completionTime=stamp(ago(61))),
        ),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(actions=(DeleteJob(),)),
    ),
    Row(
        id="time to live 0 deletes at once",
        job=job(
            spec={"runPolicy": {"ttlSecondsAfterFinished": 0}},
            status=status("Failed", completionTime=stamp(ago(0))),
        ),
        seen=seen(),
        want=Want(actions=(DeleteJob(),)),
    ),
    Row(
        id="the deadline is waited for",
        job=job(spec={"runPolicy": {"activeDeadlineSeconds": 700}}, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(phase="Running", wake_in_s=100),
    ),
    Row(
        id="a hold-off does not stop the deadline's clock",
        job=job(spec={"runPolicy": {"activeDeadlineSeconds": 500}}, status=status("Restarting")),
        seen=seen(),
        want=Want(phase="Failed", events=("DeadlineExceeded",), actions=()),
    ),
    Row(
        id="past the deadline the job fails and its pods are ended",
        job=job(spec={"runPolicy": {"activeDeadlineSeconds": 500}}, status=status("Running")),
        seen=seen(ready(0), ready(1)),
        want=Want(
            phase="Failed",
            events=("DeadlineExceeded",),
            actions=(DeletePods(names_uids=(("gpt-1-0", "pod-1-0"), ("gpt-1-1", "pod-1-1")), grace_s=1),),
            conditions={"Failed": ("True", "DeadlineExceeded"), "Stalled": ("True", "DeadlineExceeded")},
        ),
    ),
    Row(
        id="a job that completed before its deadline is not failed by it",
        job=job(spec={"runPolicy": {"activeDeadlineSeconds": 500}}, status=status("Running")),
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(phase="Completed"),
    ),
]

UNCHANGED = [
    settled(job(status=status("Pending")), seen(pending(0), pending(1))),
    settled(job(status=status("Running")), seen(ready(0), ready(1))),
    settled(job(status=status("Completed")), seen(ended(0, 0), ended(1, 0))),
]
QUIET = [
    Row(
        id="waiting for nodes",
        job=UNCHANGED[0],
        seen=seen(pending(0), pending(1)),
        want=Want(writes=False, events=(), actions=()),
    ),
    Row(
        id="running",
        job=UNCHANGED[1],
        seen=seen(ready(0), ready(1)),
        want=Want(writes=False, events=(), actions=()),
    ),
    Row(
        id="completed",
        job=UNCHANGED[2],
        seen=seen(ended(0, 0), ended(1, 0)),
        want=Want(writes=False, events=(), actions=()),
    ),
    Row(
        id="a deletion by somebody else is watched, not answered",
        job=UNCHANGED[1],
        seen=seen(ready(0), going(1)),
        want=Want(writes=False, events=(), actions=(), wake_in_s=60 + 120 + 1),
    ),
]


START_QUEUE_MESSAGE = {"Reconciling": "large ones one at a time"}
IN_START_QUEUE = [
    Row(
        id="a new job",
        job=job(),
        seen=seen(in_start_queue=True),
        want=Want(
            phase="Pending",
            attempt=0,
            actions=(),
            events=(),
            conditions={"Reconciling": ("True", "CreatingPods")},
            messages=START_QUEUE_MESSAGE,
        ),
    ),
    Row(
        id="one that goes on after a suspension",
        job=job(spec={"suspend": False}, status=status("Suspended")),
        seen=seen(in_start_queue=True),
        want=Want(phase="Restarting", attempt=1, actions=(), messages=START_QUEUE_MESSAGE),
    ),
    Row(
        id="one that its queue admitted keeps the phase in which it waits for that",
        job=job(status=status("Queued", attempt=0)),
        seen=seen(in_start_queue=True),
        want=Want(phase="Queued", attempt=0, actions=(), events=(), messages=START_QUEUE_MESSAGE),
    ),
    Row(
        id="one that is refused pods says so still",
        job=job(),
        seen=seen(in_start_queue=True, problem=Problem(reason="QuotaExceeded", message="exceeded quota: q")),
        want=Want(phase="Pending", actions=(), messages={"Reconciling": "exceeded quota: q"}),
    ),
]
"""Rows of jobs that wait until others of their namespace have their pods."""


@pytest.mark.parametrize("row", IN_START_QUEUE, ids=lambda row: row.id)
def test_a_job_in_the_start_queue_reports_it(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", START + PROGRESS, ids=lambda row: row.id)
def test_start_and_progress(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", END, ids=lambda row: row.id)
def test_end(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", QUIET, ids=lambda row: row.id)
def test_a_second_pass_over_the_same_facts_does_nothing(row: Row) -> None:
    check(row)
