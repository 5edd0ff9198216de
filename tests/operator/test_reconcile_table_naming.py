"""reconcile and the Service of worker 0: when it is made, and for whom not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.reconcile_builders import (
    Row,
    Want,
    ago,
    check,
    ended,
    going,
    job,
    pending,
    ready,
    running,
    seen,
    status,
)
from zerotrain.operator.reconcile import KeepShared, NameMaster, PodView, can_wait, reconcile

MAKE = NameMaster(attempt=1)


def unnamed(*pods: PodView, id: str, want: Want, phase: str = "Pending", **more: Any) -> Row:
    """Two workers of which this operator has named none, unless `named` says so."""
    observed = seen(*pods, named=more.pop("named", None), shared_due=more.pop("due", None))
    spec = more.pop("spec", {})
    return Row(id=id, job=job(spec=spec, status=status(phase, **more)), seen=observed, want=want)


ROWS = [
    unnamed(pending(0), pending(1), id="not before worker 0 has an address", want=Want(actions=())),
    unnamed(pending(0), running(1), id="nor for the address of another worker", want=Want(actions=())),
    unnamed(running(0), pending(1), id="as soon as it has", want=Want(actions=(MAKE,))),
    unnamed(
        pending(0, pod_ip="fd00::7"),
        pending(1),
        id="though its image is still on the way",
        want=Want(actions=(MAKE,)),
    ),
    unnamed(
        ready(0),
        ready(1),
        id="also in the pass that sees all ready",
        want=Want(phase="Running", actions=(MAKE,)),
    ),
    unnamed(running(0), pending(1), id="once", named=1, want=Want(actions=())),
    unnamed(
        running(0, attempt=2),
        running(1, attempt=2),
        id="again for the next attempt: somebody may have deleted it",
        attempt=2,
        named=1,
        want=Want(actions=(NameMaster(attempt=2),)),
    ),
    unnamed(
        ready(0),
        ready(1),
        id="not for ranks that have met: a takeover of thousands of jobs makes nothing",
        phase="Running",
        want=Want(actions=()),
    ),
    unnamed(
        running(0),
        pending(1),
        id="before the look at other objects, which may be refused",
        due=ago(0),
        want=Want(actions=(MAKE, KeepShared(attempt=1))),
    ),
    unnamed(
        running(0),
        running(1),
        id="of a first attempt that nobody wrote down, though the job was called suspended",
        phase="Suspended",
        attempt=0,
        want=Want(phase="Starting", attempt=1, actions=(MAKE,)),
    ),
    unnamed(
        going(0),
        ready(1),
        id="for a pod that is asked to go: its ranks may still checkpoint",
        want=Want(actions=(MAKE,)),
    ),
    unnamed(ended(0, 0), running(1), id="not for one that has ended", want=Want(actions=())),
    unnamed(
        running(0),
        running(1),
        id="not for a program of the user's, whose Service selects all workers",
        spec={"command": ["python", "train.py"]},
        want=Want(actions=()),
    ),
    unnamed(
        running(0),
        id="not for one worker alone",
        spec={"workers": 1},
        shape={"workers": 1},
        want=Want(actions=()),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_worker_0_gets_its_name(row: Row) -> None:
    check(row)


def test_a_name_alone_makes_no_status_urgent() -> None:
    """The counts that come with the address wait for those of the other pods, as without it."""
    row = unnamed(running(0), pending(1), id="", podsCreated=False, want=Want())
    plan = reconcile(row.job, row.seen, row.now)
    assert plan.actions == (MAKE,)
    assert plan.status is not None
    before = plan.status.model_copy(update={"pods_created": False})
    assert can_wait(before, plan)
    assert not plan.decisive
