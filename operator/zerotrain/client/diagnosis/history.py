"""History of a job, in order: the ends of its attempts, and the events in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from zerotrain.client.job import Job, command
from zerotrain.client.observed import Event
from zerotrain.contract.exit_codes import meaning_of
from zerotrain.operator.api.status import FailureRecord

_EARLIEST = datetime.min.replace(tzinfo=UTC)
_CAUSES = {
    "app": "charged to maxRestarts",
    "infra": "charged to maxInfrastructureRestarts",
    "preemption": "charged to nothing: a preemption",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """One entry of the history."""

    time: datetime | None
    is_bad: bool
    title: str
    details: tuple[str, ...] = ()


def happenings(job: Job, events: Sequence[Event]) -> Iterator[Happening]:
    """Iterate over the history, oldest first. An event is left out if the record of a failure contains the
    same in more detail."""
    entries = [_failure(job, failure) for failure in job.failures]
    for event in events:
        if _is_of_failure(job, event) or _is_a_start(event):
            continue
        about = f"{event.kind} {event.name}: " if event.kind == "Pod" else ""
        times = f" (x{event.count})" if event.count > 1 else ""
        # Pods' events matter only as warnings: the rest is in the job's own events.
        if event.kind != "Pod" or event.is_warning:
            title = f"{event.reason}{times}: {about}{event.message}"
            entries.append(Happening(time=event.time, is_bad=event.is_warning, title=title))
    yield from sorted(entries, key=lambda item: item.time or _EARLIEST)


def _is_of_failure(job: Job, event: Event) -> bool:
    """Return whether the record of a failure contains the same."""
    return event.kind != "Pod" and any(
        event.reason == failure.reason and event.message.startswith(f"attempt {failure.attempt}:")
        for failure in job.failures
    )


def _is_a_start(event: Event) -> bool:
    """Return whether the event is a failed readiness probe. A worker is not ready until all ranks have
    joined, and the kubelet reports that as unhealthy."""
    return event.kind == "Pod" and event.message.startswith("Readiness probe")


def _failure(job: Job, failure: FailureRecord) -> Happening:
    who = [f"rank {failure.rank}"] if failure.rank is not None else []
    who += [f"pod {failure.pod}"] if failure.pod else []
    who += [f"init container {failure.container}"] if failure.container else []
    who += [f"node {failure.node}"] if failure.node else []
    at = f" at step {failure.step:,}" if failure.step is not None else ""
    place = f" ({', '.join(who)})" if who else ""
    title = f"attempt {failure.attempt} ended{at}: {failure.reason}{place}"
    return Happening(time=failure.time, is_bad=True, title=title, details=tuple(_details(job, failure)))


def _details(job: Job, failure: FailureRecord) -> Iterator[str]:
    if failure.message:
        yield failure.message
    is_explained = failure.container or failure.message.startswith("exit code")
    if failure.exit_code is not None and not is_explained:
        yield f"exit code {failure.exit_code}: {meaning_of(failure.exit_code).meaning}"
    if failure.last_line and failure.last_line not in failure.message:
        yield f"last line: {failure.last_line}"
    if failure.action:
        by = f"rule {failure.rule} of failurePolicy" if failure.rule is not None else "the built-in table"
        paid = _CAUSES.get(failure.cause or "", "")
        yield f"{failure.action}, by {by}{f'; {paid}' if paid else ''}"
    others = [item for item in failure.ranks if item.pod and item.pod != failure.pod]
    if others:
        named = ", ".join(f"{item.pod} {item.reason}" for item in others[:4])
        yield f"also: {named}{', ...' if len(others) > 4 else ''}"
    if failure.log:
        yield f"its last lines: {command(job, 'logs', f'--attempt {failure.attempt}')}"
    if failure.stacks:
        yield f"the ranks' stacks: kubectl -n {job.namespace} get configmap {failure.stacks} -o yaml"
