"""Rules that give advice on a job, the most urgent first. Each covers one kind of trouble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from zerotrain.client.diagnosis.case import Advice, Case
from zerotrain.client.diagnosis.pods import held, late, refused, unstarted
from zerotrain.client.job import Job
from zerotrain.client.lenient_json import Fields
from zerotrain.client.observed import Event, Pod
from zerotrain.contract.exit_codes import EXIT_CODES, meaning_of
from zerotrain.contract.unreachable import reports_unreachable_host
from zerotrain.operator.constants import ANNOTATION_IGNORE_MEMORY_PLAN, LABEL_JOB, MANAGER

UNSEEN_S = 30.0
"""Age in seconds of a job without a phase from which on something is wrong with the operator."""

UNREAD_S = 300.0
"""Age in seconds of a job with an unobserved edit from which on something is wrong with the operator."""

MAX_ADVICE = 6


def advice_for(job: Job, events: Sequence[Event], pods: Sequence[Pod], now: datetime) -> Iterator[Advice]:
    """Iterate over at most MAX_ADVICE pieces of advice, without repetitions."""
    case = Case(job=job, events=events, pods=pods, now=now)
    given = dict.fromkeys(advice for rule in _RULES for advice in rule(case))
    yield from list(given)[:MAX_ADVICE]


def _operator(case: Case) -> Iterator[Advice]:
    job = case.job
    meta, manager = Fields(job.raw).part("metadata"), Fields(job.spec).text("managedBy")
    if manager and manager != MANAGER:
        yield Advice(text=f"spec.managedBy is {manager}: that controller manages the job, not zerotrain.")
        return
    behind = job.status.observed_generation < meta.count("generation")
    age_s = (case.now - job.created).total_seconds() if job.created is not None else 0.0
    if (not job.phase and age_s > UNSEEN_S) or (job.phase and behind and age_s > UNREAD_S):
        yield Advice(
            text="No operator has processed the newest version of the job. Is it running, and does it watch "
            "this namespace?",
            command="kubectl get pods -A -l app.kubernetes.io/component=operator",
        )


def _stalled(case: Case) -> Iterator[Advice]:
    job, reason = case.job, case.reason("Stalled", "True")
    if job.phase != "Stalled":
        return
    if reason == "DoesNotFit":
        yield Advice(
            text="Use the nearest configuration that the message names, or request more memory. This command "
            "shows the numbers of every tier:",
            command="zerotrain plan JOB.YAML",
        )
        yield Advice(
            text="If the planner is wrong, start the job anyway.",
            command=case.kubectl(f"annotate ztj {job.name} {ANNOTATION_IGNORE_MEMORY_PLAN}=true"),
        )
        return
    yield Advice(
        text="Correct the field that the message names; the operator goes on by itself.",
        command=case.kubectl(f"edit ztj {job.name}"),
    )


def _failed(case: Case) -> Iterator[Advice]:
    job, reason = case.job, case.reason("Failed", "True")
    if job.phase != "Failed":
        return
    newest = job.failures[0] if job.failures else None
    if reason == "DeadlineExceeded":
        yield Advice(text="The job had runPolicy.activeDeadlineSeconds; submit it anew with a longer one.")
        return
    if newest is not None:
        if newest.container:
            yield Advice(
                text=f"Init container {newest.container} of spec.podTemplate failed before any rank started: "
                "correct it, or what it reads. The job's NetworkPolicy also binds init containers.",
                command=case.kubectl(f"edit ztj {job.name}"),
            )
        else:
            yield from _way_out(newest.exit_code)
        if newest.reason == "OutOfMemory" and not newest.container:
            yield Advice(
                text="Raise resources.memory (or take more ranks, offloading, or a smaller micro batch); the "
                "plan shows how much is needed.",
                command="zerotrain plan JOB.YAML",
            )
        if newest.log or newest.pod:
            yield Advice(
                text=f"Read what {newest.container or 'the failing rank'} wrote last.",
                command=case.zerotrain("logs", f"--attempt {newest.attempt}"),
            )
    if reason == "FailedByRule":
        yield Advice(text="A rule of failurePolicy.rules ended it; change the rule if that was not meant.")
    kept = f" It resumes from step {job.last_checkpoint.step:,}." if job.last_checkpoint is not None else ""
    yield Advice(
        text=f"Then submit it again under the same name: delete this one first; checkpoints stay.{kept}",
        command=case.zerotrain("delete"),
    )


def _unreachable(case: Case) -> Iterator[Advice]:
    """Advise on the network if the newest failure is a program, or an init container, that could not
    connect."""
    newest = case.job.failures[0] if case.job.failures else None
    if newest is None or not (
        reports_unreachable_host(newest.message) or reports_unreachable_host(newest.last_line)
    ):
        return
    yield _egress(case, "The program could not reach the network")


def _egress(case: Case, finding: str) -> Advice:
    return Advice(
        text=f"{finding}: the job's NetworkPolicy lets its pods out to their "
        "ranks and DNS alone. Name the network in spec.network.egressCidrs (within the chart's "
        "jobs.allowedEgressCidrs), or add a NetworkPolicy of your own for pods with the label "
        f"{LABEL_JOB}={case.job.name}: policies add up.",
        command=case.kubectl(f"get networkpolicy {case.job.name} -o yaml"),
    )


def _way_out(code: int | None) -> Iterator[Advice]:
    if code is not None and any(row.code == code for row in EXIT_CODES) and code < 128:
        row = meaning_of(code)
        yield Advice(text=f"Exit code {code} ({row.meaning}): {row.way_out}.")


def _waiting(case: Case) -> Iterator[Advice]:
    job = case.job
    if job.phase not in ("Queued", "Pending", "Starting", "Restarting"):
        return
    reasons = {case.reason("Admitted", "False"), case.reason("PodsScheduled", "False")}
    reasons.add(case.reason("Reconciling", "True"))
    elastic = "elastic" in job.spec
    if "Unschedulable" in reasons:
        less = (
            "lower spec.workers" if elastic else "request less (resources, workers, scheduling.nodeSelector)"
        )
        yield Advice(
            text=f"The cluster has no capacity for all workers at once. Wait, add nodes, or {less}.",
            command="kubectl describe nodes | grep -A8 'Allocated resources'",
        )
    if "GaveBack" in reasons:
        yield Advice(
            text="The job got a part of its pods or nodes and gave it back; it tries again by itself. If "
            "that repeats, raise the quota, add nodes, request less, or give it a queue (queueName).",
            command=case.kubectl("describe resourcequota"),
        )
    if "QueueMissing" in reasons:
        yield Advice(
            text="The job names a queue and the cluster has no Kueue: install it, or drop queueName."
        )
    if "GangMissing" in reasons:
        yield Advice(text="Install what scheduling.gang names, or use Auto or None.")
    if "SchedulerMissing" in reasons:
        yield Advice(
            text="Start the scheduler that the message names. Otherwise change scheduling.schedulerName or "
            "scheduling.gang while the job is suspended.",
            command="kubectl get pods -A | grep -i -e scheduler -e volcano",
        )
    if "Queued" in reasons or "QueueEvicted" in reasons:
        yield Advice(
            text="The job waits for its queue; see what the queue reports.",
            command=case.kubectl(f"get workloads.kueue.x-k8s.io -l zerotrain.dev/job={job.name}"),
        )
    if "InitContainerRuns" in reasons:
        yield _egress(case, "An init container has run for minutes. It may wait for packets that are dropped")
    yield from refused(case, reasons)
    yield from unstarted(case)


def _held_up(case: Case) -> Iterator[Advice]:
    job, hang, slow = case.job, case.job.hang, case.job.straggler
    if hang is not None and hang.attempt == job.attempt:
        rank = f"--rank {hang.rank}" if hang.rank is not None else ""
        yield Advice(
            text="The operator ends the attempt by itself unless hangPolicy.action is Report. See the "
            "stacks of the ranks.",
            command=case.kubectl(f"get configmap {hang.stacks} -o jsonpath='{{.data.summary\\.txt}}'")
            if hang.stacks
            else case.zerotrain("logs", rank),
        )
    elif slow is not None and slow.attempt == job.attempt:
        yield Advice(
            text=f"Nothing is restarted for a slow rank. Is node {slow.node} shared or throttled?",
            command=case.zerotrain("top"),
        )
    silent = case.reason("Progressing", "False") == "StepStale"
    if silent and hang is None:
        yield Advice(text="The step does not advance; look at the ranks.", command=case.zerotrain("top"))


def _memory(case: Case) -> Iterator[Advice]:
    plan = case.job.memory_plan
    if case.job.is_finished or plan is None or case.job.phase == "Stalled":
        return
    if plan.verdict == "Tight":
        yield Advice(text="Its memory is tight: it fits only if the estimates err on the safe side.")
    limits = case.has("OutOfMemory") or any(item.reason == "OutOfMemory" for item in case.job.failures)
    if limits and case.job.phase != "Failed":
        yield Advice(
            text="A rank ran out of memory: raise resources.memory.", command="zerotrain plan JOB.YAML"
        )


def _checkpoints(case: Case) -> Iterator[Advice]:
    job, verified = case.job, case.job.verification
    if verified is not None and verified.state == "Damaged":
        yield Advice(
            text="The newest checkpoint is damaged or gone: see its pod's log. Earlier ones may be whole.",
            command=case.kubectl(f"logs {verified.pod}"),
        )
    if case.has("CheckpointRejected"):
        yield Advice(text="A damaged checkpoint was passed over: check the volume that holds checkpoints.")
    if case.has("YieldTimeout") and "checkpoint" in job.spec:
        yield Advice(text="Raise checkpoint.gracePeriodSeconds above one step plus one checkpoint.")
    if "checkpoint" not in job.spec and job.phase in ("Running", "Starting"):
        yield Advice(text="The job has no spec.checkpoint: every restart begins at step 0.")


def _calm(case: Case) -> Iterator[Advice]:
    """Suggest the usual next command where nothing is wrong."""
    job = case.job
    if job.phase == "Suspended":
        yield Advice(text="Go on from the checkpoint.", command=case.zerotrain("resume"))
    if job.phase == "Restarting" and job.failures:
        yield Advice(
            text="The operator starts the next attempt by itself. What the last one wrote:",
            command=case.zerotrain("logs", f"--attempt {job.failures[0].attempt}"),
        )
    if job.phase == "Running" and job.hang is None:
        yield Advice(text="Watch the ranks.", command=case.zerotrain("top"))


_RULES: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    _operator,
    _stalled,
    _unreachable,
    _failed,
    held,
    _waiting,
    late,
    _held_up,
    _checkpoints,
    _memory,
    _calm,
)
