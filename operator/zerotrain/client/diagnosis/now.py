"""Present state of a job, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from zerotrain.client.formatting import compute_text, counted, since, span
from zerotrain.client.job import Job
from zerotrain.client.observed import Pod
from zerotrain.operator.api.hangs import HangStatus, StragglerStatus

_PHASES = {
    "": "the operator has not seen the job yet",
    "Queued": "waits in a queue or for capacity; it holds no resources",
    "Pending": "pods are being created or wait for nodes",
    "Starting": "all pods run; the ranks are on their way to the first step",
    "Running": "trains",
    "Restarting": "the pods of the last attempt are deleted, then the next attempt starts",
    "Yielding": "the ranks checkpoint and stop, to go on elsewhere or in another size",
    "Suspending": "the ranks checkpoint and stop",
    "Suspended": "is suspended and holds no resources",
    "Stalled": "waits until you correct it",
    "Completed": "is complete",
    "Failed": "has failed",
}
_NOT_OF_THE_JOB = ("", "Pending", "Starting", "Restarting", "Yielding", "Suspending")
"""Phases whose sentence is about pods or ranks."""

_YIELDS = {
    "Suspend": "because spec.suspend is true",
    "QueueEviction": "because its queue wants the resources back",
    "Drain": "because a worker has to leave its node",
    "Resize": "to go on with another number of workers",
}


def headline(job: Job, now: datetime) -> str:
    """Return one line, such as `gpt trains; step 140 of 1,000 (14 %), attempt 2`."""
    what = _PHASES.get(job.phase, f"is {job.phase}")
    text = f"{job.name}: {what}" if job.phase in _NOT_OF_THE_JOB else f"{job.name} {what}"
    if job.total_steps and job.attempt:
        text += f"; step {job.step:,} of {job.total_steps:,} ({100 * job.step / job.total_steps:.0f} %)"
    elif job.step:
        text += f"; step {job.step:,}"
    if job.attempt:
        text += f", attempt {job.attempt}"
    if job.is_finished and job.completion_time is not None:
        text += f", ended {since(job.completion_time, now)} ago"
    return text


def situation(job: Job, pods: Sequence[Pod], now: datetime) -> Iterator[str]:
    """Iterate over sentences, the most important first."""
    yield from _why(job)
    yield from _pace(job, now)
    yield from _size(job)
    yield from _attempt(job, now)
    yield from _stops(job, now)
    yield from _checkpoint(job, now)
    yield from _culprits(job, now)
    yield from _memory(job)
    if job.excluded_nodes:
        named = ", ".join(job.excluded_nodes[:5])
        yield f"The job keeps off {counted(len(job.excluded_nodes), 'node')} for a while: {named}."
    yield from _waiting_pods(job, pods)


def _why(job: Job) -> Iterator[str]:
    """Iterate over the messages of the conditions that explain the phase."""
    for kind, phases in (
        ("Failed", ("Failed",)),
        ("Stalled", ("Stalled",)),
        ("Admitted", ("Queued",)),
        ("PodsScheduled", ("Pending", "Queued")),
        ("Reconciling", ("Pending", "Starting", "Restarting")),
        ("Suspended", ("Suspended",)),
    ):
        found = job.condition(kind)
        if found is None or job.phase not in phases or not found.message:
            continue
        if kind in ("Admitted", "PodsScheduled") and found.is_true:
            continue
        yield f"{found.reason}: {found.message}"
        if kind != "PodsScheduled":
            return


def _pace(job: Job, now: datetime) -> Iterator[str]:
    if job.phase not in ("Running", "Yielding", "Suspending"):
        return
    facts = []
    if job.step_seconds:
        facts.append(f"{job.step_seconds:.3g} s a step")
    if job.loss is not None:
        facts.append(f"loss {job.loss:.4g}")
    if job.tokens_per_second:
        facts.append(f"{job.tokens_per_second:,.0f} tokens/s")
    if computing := compute_text(job.step_flops, job.mfu):
        facts.append(computing)
    if job.activity:
        facts.append(f"rank 0 is in {job.activity}")
    if job.last_step_time is not None:
        facts.append(f"last step {since(job.last_step_time, now)} ago")
    if facts:
        yield f"{', '.join(facts)}."
    if job.phase == "Running" and job.step_seconds and job.total_steps and job.total_steps > job.step:
        yield f"About {span((job.total_steps - job.step) * job.step_seconds)} to go at this pace."


def _size(job: Job) -> Iterator[str]:
    if job.is_finished or not job.workers.desired:
        return
    stage = f", ZeRO stage {job.zero_stage}" if job.zero_stage is not None else ""
    yield (
        f"{job.workers.running} of {counted(job.workers.desired, 'worker')} run, "
        f"{job.ranks.ready} of {counted(job.ranks.desired, 'rank')} have met{stage}."
    )
    elastic = job.status.elastic
    if elastic is not None and elastic.message:
        yield f"The size is not the one asked for ({elastic.reason or ''}): {elastic.message}"


def _attempt(job: Job, now: datetime) -> Iterator[str]:
    if not job.attempt:
        return
    if job.attempt_start_time is not None and not job.is_finished:
        start = f"Attempt {job.attempt} began {since(job.attempt_start_time, now)} ago"
        resumed = job.resumed_from_step
        yield f"{start}{f', from the checkpoint of step {resumed:,}' if resumed else ''}."
    restarts = job.restarts
    if restarts.total:
        named = (
            ("after failures of the program", restarts.app),
            ("after lost nodes or pods", restarts.infra),
            ("after preemptions or moves", restarts.preemption),
            ("not charged", restarts.uncharged),
        )
        causes = ", ".join(f"{count} {name}" for name, count in named if count)
        yield f"{counted(restarts.total, 'restart')} so far{f' ({causes})' if causes else ''}."
    if job.next_attempt_time is not None and job.next_attempt_time > now:
        yield f"The next attempt starts in {span((job.next_attempt_time - now).total_seconds())}."


def _stops(job: Job, now: datetime) -> Iterator[str]:
    request = job.yield_request
    if request is None:
        return
    why = _YIELDS.get(request.reason, request.reason)
    more = f": {request.message}" if request.message else ""
    yield f"The ranks were asked {since(request.requested_at, now)} ago to checkpoint and stop, {why}{more}."


def _checkpoint(job: Job, now: datetime) -> Iterator[str]:
    last = job.last_checkpoint
    if last is None:
        if "checkpoint" in job.spec and job.attempt:
            yield "There is no checkpoint yet: an attempt that ends now loses everything."
        return
    state = "durable" if last.durable else "not durable yet"
    yield f"Newest checkpoint: step {last.step:,}, {since(last.time, now)} old, {state}, in {last.path}."
    verified = job.verification
    if verified is not None:
        message = f": {verified.message}" if verified.message else ""
        yield f"Verification of step {verified.step:,}: {verified.state}{message}."


def _culprits(job: Job, now: datetime) -> Iterator[str]:
    hang = job.hang
    if hang is not None and hang.attempt == job.attempt:
        yield (
            f"Hung since {since(hang.detected_at, now)}: step {hang.step:,} does not end; "
            f"the limit of {hang.phase or 'the phase'} is {span(hang.limit_seconds)}. {_who(hang)}"
        )
    slow = job.straggler
    if slow is not None and slow.attempt == job.attempt:
        yield f"{_who(slow)} Its steps take {slow.percent} % of the middle rank's, and all others wait."


def _who(culprit: HangStatus | StragglerStatus) -> str:
    message = culprit.message if isinstance(culprit, HangStatus) else ""
    if culprit.rank is None:
        return message or "No rank stands out."
    place = f"rank {culprit.rank} (pod {culprit.pod}, node {culprit.node or '?'})"
    return f"Held up by {place}{f': {message}' if message else ''}."


def _memory(job: Job) -> Iterator[str]:
    plan = job.memory_plan
    if plan is not None and plan.verdict in ("Tight", "DoesNotFit") and plan.message:
        yield f"Memory plan, {plan.verdict}: {plan.message}"


def _waiting_pods(job: Job, pods: Sequence[Pod]) -> Iterator[str]:
    """Iterate over pods that do not start, grouped by their reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        if pod.attempt == job.attempt and pod.exit_code is None and not pod.started and pod.reason:
            reasons.setdefault((pod.reason, pod.message), []).append(pod.name)
    for (reason, message), names in list(reasons.items())[:3]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"Pod {names[0]}{more} waits: {reason}{f': {message}' if message else ''}"
