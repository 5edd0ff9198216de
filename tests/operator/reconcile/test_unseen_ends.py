"""Workers whose pods went while no operator ran: when that completes the job, and when not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    job,
    last_words,
    ready,
    seen,
    settled,
    stamp,
    status,
)
from zerotrain.contract.progress import Termination
from zerotrain.operator.reconcile import DeleteWorkers, Observed

pytestmark = pytest.mark.unit


SHORT = {"checkpoint": None}


def words(step: int, *, saved: int | None = None) -> Termination:
    return replace(last_words(0, step=saved), step=step)


def durable(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    last = {"step": step, "attempt": attempt, "time": stamp(ago(30)), "durable": True, **more}
    return {"checkpoint": {"last": last}}


def case(id: str, observed: Observed, phase: str, *, at: str = "Running", **more: Any) -> Row:
    spec = more.pop("spec", {})
    kept = {name: value for name, value in job(spec=spec)["spec"].items() if value is not None}
    attempt = more.pop("attempt", 1)
    body = {**job(status=status(at, attempt, **more)), "spec": kept}
    return Row(id=id, job=body, seen=observed, want=Want(phase=phase))


DONE = [
    case(
        "one-says-that-it-saved-the-last-step",
        seen(ended(1, 0, termination=words(100, saved=100))),
        "Completed",
    ),
    case("the-status-knows-of-the-last-checkpoint", seen(ended(1, 0)), "Completed", **durable(100)),
    case("all-pods-are-gone-after-the-last-checkpoint", seen(), "Completed", **durable(100)),
    case("whose-node-is-gone", seen(ended(1, 0), gone=(ready(0),)), "Completed", **durable(100)),
    case(
        "without-checkpoints-one-made-the-last-step",
        seen(ended(1, 0, termination=words(100))),
        "Completed",
        spec=SHORT,
    ),
    case(
        "the-pods-went-while-the-ranks-were-to-yield",
        seen(ended(1, 0)),
        "Completed",
        at="Suspending",
        spec={"suspend": True},
        **durable(100),
    ),
]
NOT_DONE = [
    case("an-earlier-checkpoint", seen(ended(1, 0)), "Restarting", **durable(99)),
    case("no-checkpoint", seen(ended(1, 0)), "Restarting"),
    case(
        "the-last-step-without-its-checkpoint",
        seen(ended(1, 0, termination=words(100, saved=80))),
        "Restarting",
    ),
    case("the-checkpoint-of-another-attempt", seen(ended(1, 0, 2)), "Restarting", attempt=2, **durable(100)),
    case("a-checkpoint-that-is-not-durable", seen(ended(1, 0)), "Restarting", **durable(100, durable=False)),
    case("one-failed", seen(ended(1, 1)), "Restarting", **durable(100)),
    case("one-was-seen-to-fail", seen(ended(1, 0), gone=(ended(0, 1),)), "Restarting", **durable(100)),
    case("one-yielded", seen(ended(1, 75)), "Restarting", **durable(100)),
    case("one-still-runs", seen(ready(1)), "Restarting", **durable(100)),
    case("more-steps-were-asked-for", seen(ended(1, 0)), "Restarting", spec={"steps": 200}, **durable(100)),
    case(
        "a-program-of-the-user-s-own",
        seen(ended(1, 0, termination=words(100, saved=100))),
        "Restarting",
        spec={"command": ["python", "train.py"]},
        **durable(100),
    ),
    case(
        "without-checkpoints-the-last-step-alone",
        seen(),
        "Pending",
        spec=SHORT,
        progress={"attempt": 1, "step": 100},
    ),
    case(
        "without-checkpoints-an-earlier-step",
        seen(ended(1, 0, termination=words(99))),
        "Restarting",
        spec=SHORT,
    ),
]


@pytest.mark.parametrize("row", [*DONE, *NOT_DONE], ids=lambda row: row.id)
def test_row(row: Row) -> None:
    check(row)


def test_the_event_names_workers_whose_end_was_not_observed() -> None:
    row = case("told", seen(ended(1, 0)), "Completed", **durable(100))
    check(
        replace(
            row,
            want=Want(events=("Completed",), messages={"event": "the pods of workers 0 ended unobserved"}),
        )
    )


def test_a_failed_rank_after_the_last_checkpoint_is_not_hidden_by_its_pod_s_end() -> None:
    """A failure that one operator saw stays a failure for the pass that comes after the pod is gone."""
    first = case("failed", seen(ended(0, 1), ended(1, 0)), "Restarting", **durable(100))
    check(first)
    after = settled(first.job, first.seen)
    check(
        Row(
            id="gone",
            job=after,
            seen=seen(ended(1, 0)),
            want=Want(phase="Restarting", actions=(DeleteWorkers(attempt=1, grace_s=1),)),
        )
    )
