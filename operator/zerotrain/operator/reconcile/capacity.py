"""All or nothing without a scheduler's help: which of the waiting jobs may create their pods now.

`cluster.capacity` reads nodes and pods while a job waits and asks `admit`. Pure: the same cluster and the
same claims give the same verdicts.

Order: priority, then age. A job that fits starts. One that does not fit *keeps* the nodes that it will need,
the emptiest ones, so that smaller jobs behind it cannot take what becomes free there, and it starts at the
latest when these nodes have drained; jobs behind it may use all other nodes and are told to avoid the kept
ones. A job that the cluster could not hold if it were idle keeps nothing and holds nobody up; where it could
a moment ago, it keeps its nodes for a while: a node that is away for a minute must not cost it its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from zerotrain.operator.reconcile.claims import Claim, Demand, Kept, NodeUse, Verdict
from zerotrain.operator.reconcile.ledger import Area, Ledger

MAX_AVOIDED = 64
"""Longest list of nodes that a pod is told to avoid; a job behind a larger kept area waits instead."""

MAX_BLOCKED = 64
"""Waiting jobs that nodes are kept for in one round; the others wait behind them."""

UNSURE = "there may be room for all workers once the pods of jobs that were just let in have nodes"

KEEP_S = 300.0
"""So long a job keeps its nodes after the cluster became too small for it: a restart of a kubelet, a cordon
for maintenance or a reboot takes minutes, and what drained meanwhile would be lost to smaller jobs."""

_EPOCH = datetime.fromtimestamp(0, UTC)


def admit(
    nodes: Sequence[NodeUse],
    waiting: Iterable[Claim],
    starting: Iterable[Claim] = (),
    *,
    kept: Mapping[str, Kept] | None = None,
    now: datetime = _EPOCH,
) -> dict[str, Verdict]:
    """Verdicts by UID for `waiting`. `starting` were let in before and have first call on what is free; one
    of them that asks all the same wants to know how many of its workers will find a node. `kept` is what the
    verdicts of the round before said (`keeps`), by UID."""
    ledger, begun = Ledger(nodes), set[str]()
    for claim in starting:
        ledger.let_in(claim, beside_own=True)
        begun.add(claim.uid)
    asked = sorted(waiting, key=_order)
    # Before anything is kept for others: pods without nodes stand in the scheduler's line.
    verdicts = {claim.uid: _count(ledger, claim) for claim in asked if claim.uid in begun}
    blocked: list[Claim] = []
    for claim in asked:
        if claim.uid in begun:
            continue
        if len(blocked) >= MAX_BLOCKED:
            verdicts[claim.uid] = _refused(claim, None, f"waits behind {len(blocked)} other jobs")
            continue
        possible = ledger.possible(claim)
        before = _still_kept(claim, possible, (kept or {}).get(claim.uid), now)
        verdict = _judge(ledger, claim, blocked, possible)
        if not verdict.admitted and not claim.growing:
            verdict = _keep(ledger, claim, verdict, before, now if possible >= claim.demand.workers else None)
        if verdict.keeps is not None:
            blocked.append(claim)
        verdicts[claim.uid] = verdict
    return verdicts


def _still_kept(claim: Claim, possible: int, before: Kept | None, now: datetime) -> Kept | None:
    """What a job keeps although the cluster is too small for it now."""
    if before is None or possible >= claim.demand.workers or claim.growing:
        return None
    return before if now < before.until and before.demand == claim.demand else None


def _keep(
    ledger: Ledger, claim: Claim, verdict: Verdict, before: Kept | None, since: datetime | None
) -> Verdict:
    """`since`: now, where the cluster could hold the job."""
    if before is not None:
        ledger.set_aside(before.nodes)
        until = f"its nodes stay kept until {before.until:%H:%M:%S} UTC"
        return replace(verdict, message=f"{verdict.message}; {until}", keeps=before)
    if since is None:
        return verdict
    kept = Kept(nodes=ledger.keep(claim), demand=claim.demand, until=since + timedelta(seconds=KEEP_S))
    return replace(verdict, keeps=kept)


def _refused(claim: Claim, fits: int | None, message: str) -> Verdict:
    return Verdict(admitted=False, workers=claim.demand.workers, fits=fits, message=message)


def _count(ledger: Ledger, claim: Claim) -> Verdict:
    """For a job that was let in: nothing is kept for it a second time."""
    demand, area = claim.demand, ledger.area(claim)
    fits = min(area.room, demand.workers)
    if claim.growing or fits < demand.workers:
        return _refused(claim, fits, _shortage(demand, area, fits))
    return Verdict(admitted=True, workers=demand.workers, fits=fits, domain=area.domain)


def _order(claim: Claim) -> tuple[bool, int, datetime, str]:
    # Whoever has nothing comes before whoever wants more.
    return claim.growing, -claim.demand.priority, claim.created, claim.uid


def _judge(ledger: Ledger, claim: Claim, blocked: Sequence[Claim], possible: int) -> Verdict:
    demand = claim.demand
    area = ledger.area(claim)
    kept = tuple(sorted(name for name in area.suitable if name in ledger.kept))
    fits = min(area.room, demand.workers)
    # A pod can be told to avoid a few nodes, not half a cluster: beyond that, those ahead go first.
    if len(kept) > MAX_AVOIDED:
        message = (
            f"{len(kept)} suitable nodes are kept for {len(blocked)} jobs ahead (first {blocked[0].name})"
        )
        return _refused(claim, None, f"{message}, and a pod can be told to avoid {MAX_AVOIDED}")
    if fits >= demand.workers:
        if not claim.growing and not ledger.is_sure(claim, area.domain):
            return _refused(claim, fits, UNSURE)
        ledger.let_in(claim, area.domain)
        return Verdict(admitted=True, workers=demand.workers, fits=fits, domain=area.domain, avoid=kept)
    message = _shortage(demand, area, fits, kept=len(kept), ahead=[item.name for item in blocked])
    if possible < demand.workers:
        message += f"; without other training jobs it would hold {possible}"
    return _refused(claim, fits, message)


def _shortage(demand: Demand, area: Area, room: int, *, kept: int = 0, ahead: Sequence[str] = ()) -> str:
    """`room for 1 of 4 workers: nvidia.com/gpu is missing on 3 of 5 suitable nodes`."""
    parts = [f"room for {room} of {demand.workers} workers"]
    suitable = len(area.suitable)
    if not suitable:
        parts.append(f"none of {area.unsuitable} nodes matches the selectors and taints")
    for name, nodes in sorted(area.short.items()):
        parts.append(f"{name} is missing on {nodes} of {suitable} suitable nodes")
    if demand.topology_key is not None and suitable:
        together = "spread evenly over" if demand.spread else "within one value of"
        parts.append(f"the workers must be {together} {demand.topology_key}")
    if kept and ahead:
        parts.append(f"{kept} suitable nodes are kept for {len(ahead)} jobs ahead (first {ahead[0]})")
    return "; ".join(parts)
