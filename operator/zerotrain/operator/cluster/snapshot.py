"""One reading of the cluster's nodes and pods, added up as `admit` wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.operator.constants import LABEL_HELPER
from zerotrain.operator.reconcile.capacity import Claim, Demand, NodeUse
from zerotrain.operator.reconcile.clock import parse_time
from zerotrain.operator.reconcile.placement import kind_of, node_of
from zerotrain.operator.resources.amounts import MILLI, PODS, Amounts, add, requests_of
from zerotrain.operator.resources.gang import GATE

STUCK_S = 60.0
"""So long a worker that the scheduler finds no place for counts as one that starts, and so long all of a job
do to whose pods nothing happens."""

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(kw_only=True, slots=True)
class Trace:
    """How far the pods of one job are: while it stays the same, nothing happens to them."""

    unbound: int = 0
    gated: int = 0
    """By anybody's scheduling gate."""
    newest: str = ""
    """When the last one was created, in the API server's words."""


@dataclass(kw_only=True, slots=True)
class Snapshot:
    """One reading of the cluster."""

    nodes: list[NodeUse] = field(default_factory=list)
    unbound: dict[str, Claim] = field(default_factory=dict)
    """By UID of the job: workers that exist and have no node yet."""
    seen: dict[str, int] = field(default_factory=dict)
    """By UID of the job: its workers, with or without a node."""
    traces: dict[str, Trace] = field(default_factory=dict)
    """By UID of the job, its helpers included."""


class SnapshotReader:
    """Adds up pods by node; their JSON is dropped as it comes. `owner` tells the job of a pod."""

    def __init__(
        self,
        nodes: Iterable[Mapping[str, Any]],
        owner: Callable[[Mapping[str, Any]], str | None],
        *,
        now: datetime,
    ) -> None:
        self._nodes = [node_of(node) for node in nodes]
        self._owner, self._now = owner, now
        self._lasting: dict[str, dict[int, Amounts]] = {}
        self._ours: dict[str, dict[str, dict[int, Amounts]]] = {}
        self._unbound: dict[str, Claim] = {}
        self._seen: dict[str, int] = {}
        self._traces: dict[str, Trace] = {}

    def take(self, pod: Mapping[str, Any]) -> None:
        spec, meta = pod["spec"], pod["metadata"]
        uid, node = self._owner(pod), spec.get("nodeName")
        if uid is not None:
            self._trace(uid, pod)
            if LABEL_HELPER not in meta["labels"]:
                self._seen[uid] = self._seen.get(uid, 0) + 1
        if node is None:
            if uid is not None and not _is_stuck(pod, self._now):
                self._count_unbound(uid, pod)
            return
        held = self._lasting if uid is None else self._ours.setdefault(uid, {})
        amounts = held.setdefault(node, {}).setdefault(int(spec.get("priority") or 0), {})
        add(amounts, {**requests_of(spec), PODS: MILLI})

    def snapshot(self) -> Snapshot:
        uses = [
            NodeUse(
                node=node,
                lasting=self._lasting.get(node.name, {}),
                ours={uid: held[node.name] for uid, held in self._ours.items() if node.name in held},
            )
            for node in self._nodes
        ]
        return Snapshot(nodes=uses, unbound=self._unbound, seen=self._seen, traces=self._traces)

    def _trace(self, uid: str, pod: Mapping[str, Any]) -> None:
        spec, trace = pod["spec"], self._traces.setdefault(uid, Trace())
        trace.unbound += spec.get("nodeName") is None
        trace.gated += bool(spec.get("schedulingGates"))
        trace.newest = max(trace.newest, pod["metadata"].get("creationTimestamp") or "")

    def _count_unbound(self, uid: str, pod: Mapping[str, Any]) -> None:
        known = self._unbound.get(uid)
        if known is None:
            demand = Demand(workers=1, kind=kind_of(pod), priority=int(pod["spec"].get("priority") or 0))
            claim = Claim(uid=uid, name="", created=_EPOCH, demand=demand)
        else:
            claim = replace(known, demand=replace(known.demand, workers=known.demand.workers + 1))
        self._unbound[uid] = claim


class Movement:
    """Since when nothing happens to the pods of a job, over all readings.

    Told by comparing readings and not by times in the pods: those are stamped by several machines' clocks,
    and none says when a gate was opened. So the pods of a gang count for as long as more are created, opened
    or bound, however many there are, and after a restart of the operator for `STUCK_S` in any case.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[Trace, float]] = {}

    def unbound(self, snapshot: Snapshot, now_s: float) -> list[Claim]:
        """Workers without a node, of jobs to whose pods something happened within `STUCK_S`. Of others some
        pod cannot be created, or no scheduler looks at them: nobody knows for how long. `now_s`: when the
        snapshot was taken, by a clock that never jumps."""
        before = self._since
        self._since = {}
        for uid in snapshot.unbound:
            trace = snapshot.traces[uid]
            known = before.get(uid)
            self._since[uid] = known if known is not None and known[0] == trace else (trace, now_s)
        return [claim for uid, claim in snapshot.unbound.items() if now_s - self._since[uid][1] <= STUCK_S]


def _is_stuck(pod: Mapping[str, Any], now: datetime) -> bool:
    """Whether the pod uses no room and will not soon: the scheduler has no place for it, or may not look for
    one. Room that it cannot have is others'. `Movement` tells of pods that nobody refuses."""
    if any(gate.get("name") != GATE for gate in pod["spec"].get("schedulingGates", ())):
        return True
    conditions = pod.get("status", {}).get("conditions", ())
    found: Mapping[str, Any] = next((item for item in conditions if item.get("type") == "PodScheduled"), {})
    since = parse_time(found.get("lastTransitionTime"))
    refused = found.get("status") == "False" and found.get("reason") == "Unschedulable"
    return refused and since is not None and now - since > timedelta(seconds=STUCK_S)
