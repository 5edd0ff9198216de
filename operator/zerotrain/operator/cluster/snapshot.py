"""One reading of the cluster's nodes and pods, added up as `admit` wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from zerotrain.operator.constants import LABEL_HELPER
from zerotrain.operator.reconcile.claims import Claim, Demand, NodeUse
from zerotrain.operator.reconcile.clock import parse_time
from zerotrain.operator.reconcile.placement import Node, kind_of
from zerotrain.operator.resources.amounts import MILLI, PODS, Amounts, add, requests_of
from zerotrain.operator.resources.gang import GATE

STUCK_S = 60.0
"""So long a worker that the scheduler finds no place for counts as one that starts, and so long all of a job
do to whose pods nothing happens, unless they stand in line at a scheduler that serves."""

SERVES_S = 3600.0
"""So long a scheduler counts as one that serves after the last pod that it placed or refused is gone."""

MAX_SCHEDULERS = 64
"""Remembered so; anybody may write names of schedulers into pods."""

DEFAULT_SCHEDULER = "default-scheduler"
"""Of a pod that names none."""

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(kw_only=True, slots=True)
class Trace:
    """How far the pods of one job are: while it stays the same, nothing happens to them."""

    unbound: int = 0
    gated: int = 0
    """By anybody's scheduling gate."""
    heard: int = 0
    """Of the unbound: those that their scheduler has refused before."""
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
    queued: dict[str, Counter[str]] = field(default_factory=dict)
    """By UID of the job and name of the scheduler: those of `unbound` that wait for nothing but a first look
    of their scheduler."""
    serving: set[str] = field(default_factory=set)
    """Schedulers that placed or refused some pod, whosesoever."""


class SnapshotReader:
    """Adds up pods by node; their JSON is dropped as it comes. `owner` tells the job of a pod."""

    def __init__(
        self,
        nodes: Iterable[Node],
        owner: Callable[[Mapping[str, Any]], str | None],
        *,
        now: datetime,
    ) -> None:
        self._nodes = list(nodes)
        self._owner, self._now = owner, now
        self._lasting: dict[str, dict[int, Amounts]] = {}
        self._ours: dict[str, dict[str, dict[int, Amounts]]] = {}
        """By node and UID of the job."""
        self._unbound: dict[str, Claim] = {}
        self._seen: dict[str, int] = {}
        self._traces: dict[str, Trace] = {}
        self._queued: dict[str, Counter[str]] = {}
        self._serving: set[str] = set()

    def take(self, pod: Mapping[str, Any]) -> None:
        spec, meta = pod["spec"], pod["metadata"]
        uid, node = self._owner(pod), spec.get("nodeName")
        if node is not None or _is_heard(pod):
            self._serving.add(_scheduler_of(pod))
        if uid is not None:
            self._trace(uid, pod)
            if LABEL_HELPER not in meta["labels"]:
                self._seen[uid] = self._seen.get(uid, 0) + 1
        if node is None:
            if uid is not None and not _is_stuck(pod, self._now):
                self._count_unbound(uid, pod)
            return
        if uid is None:
            held = self._lasting.setdefault(node, {})
        else:
            held = self._ours.setdefault(node, {}).setdefault(uid, {})
        amounts = held.setdefault(int(spec.get("priority") or 0), {})
        add(amounts, {**requests_of(spec), PODS: MILLI})

    def snapshot(self) -> Snapshot:
        uses = [
            NodeUse(
                node=node,
                lasting=self._lasting.get(node.name, {}),
                ours=self._ours.get(node.name, {}),
            )
            for node in self._nodes
        ]
        return Snapshot(
            nodes=uses,
            unbound=self._unbound,
            seen=self._seen,
            traces=self._traces,
            queued=self._queued,
            serving=self._serving,
        )

    def _trace(self, uid: str, pod: Mapping[str, Any]) -> None:
        spec, trace = pod["spec"], self._traces.setdefault(uid, Trace())
        trace.unbound += spec.get("nodeName") is None
        trace.gated += bool(spec.get("schedulingGates"))
        trace.heard += spec.get("nodeName") is None and _is_heard(pod)
        trace.newest = max(trace.newest, pod["metadata"].get("creationTimestamp") or "")

    def _count_unbound(self, uid: str, pod: Mapping[str, Any]) -> None:
        known = self._unbound.get(uid)
        if known is None:
            claim = Claim(uid=uid, name="", created=_EPOCH, demand=_demand_of(pod))
        else:
            claim = replace(known, demand=replace(known.demand, workers=known.demand.workers + 1))
        self._unbound[uid] = claim
        if _is_queued(pod):
            self._queued.setdefault(uid, Counter())[_scheduler_of(pod)] += 1


class Movement:
    """Since when nothing happens to the pods of a job, and which schedulers serve, over all readings.

    Told by comparing readings and not by times in the pods: those are stamped by several machines' clocks,
    and none says when a gate was opened. So the pods of a gang count for as long as more are created, opened,
    bound or refused, however many there are, and after a restart of the operator for `STUCK_S` in any case.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[Trace, float]] = {}
        self._served: dict[str, float] = {}
        """By scheduler: when it was last seen to serve, the latest last."""

    def unbound(self, snapshot: Snapshot, now_s: float) -> list[Claim]:
        """Workers without a node that count. `now_s`: when the snapshot was taken, by a clock that never
        jumps.

        All of jobs to whose pods something happened within `STUCK_S`. Of others those in line at a scheduler
        that serves, for as long as they are: it may be down or have thousands of pods to place first, and
        whoever got their room meanwhile would stand in the same line. The rest wait nobody knows how long:
        some peer cannot be created, or no scheduler looks at them.
        """
        before = self._since
        self._since = {}
        for uid in snapshot.unbound:
            trace = snapshot.traces[uid]
            known = before.get(uid)
            self._since[uid] = known if known is not None and known[0] == trace else (trace, now_s)
        serving = self._remember(snapshot.serving, now_s)
        counted = []
        for uid, claim in snapshot.unbound.items():
            if now_s - self._since[uid][1] <= STUCK_S:
                counted.append(claim)
                continue
            lines = snapshot.queued.get(uid, Counter[str]())
            workers = sum(number for scheduler, number in lines.items() if scheduler in serving)
            if workers:
                counted.append(replace(claim, demand=replace(claim.demand, workers=workers)))
        return counted

    def _remember(self, serving: set[str], now_s: float) -> set[str]:
        """All schedulers that serve. One that is down is told from one that was never there also when the
        last pods that it placed have ended: the next gang comes just then."""
        served = {name: at for name, at in self._served.items() if now_s - at <= SERVES_S}
        for name in serving:
            served.pop(name, None)
            served[name] = now_s
        self._served = dict(list(served.items())[-MAX_SCHEDULERS:])
        return serving | self._served.keys()


def _demand_of(pod: Mapping[str, Any]) -> Demand:
    """Of one worker, as its job asked for it: room that it takes from others, or needs in every zone, is no
    less its own once the pod exists."""
    spec = pod["spec"]
    hard = (
        item["topologyKey"]
        for item in spec.get("topologySpreadConstraints", ())
        if item.get("whenUnsatisfiable") == "DoNotSchedule"
    )
    spread_over = next(hard, None)
    return Demand(
        workers=1,
        kind=kind_of(pod),
        priority=int(spec.get("priority") or 0),
        preempts=spec.get("preemptionPolicy", "Never") != "Never",  # the API server fills it in
        topology_key=spread_over,
        spread=spread_over is not None,
    )


def _scheduler_of(pod: Mapping[str, Any]) -> str:
    return str(pod["spec"].get("schedulerName") or DEFAULT_SCHEDULER)


def _scheduled(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pod's condition PodScheduled; empty where nobody has written one."""
    conditions = pod.get("status", {}).get("conditions", ())
    return next((item for item in conditions if item.get("type") == "PodScheduled"), {})


def _is_heard(pod: Mapping[str, Any]) -> bool:
    """Whether a scheduler has said something of the pod. That it is gated is the API server's word, and stays
    after the gates were opened until the scheduler comes."""
    found = _scheduled(pod)
    return bool(found) and found.get("reason") != "SchedulingGated"


def _is_nominated(pod: Mapping[str, Any]) -> bool:
    """Whether the scheduler keeps a node for it, while those that it pushes aside there end."""
    return bool(pod.get("status", {}).get("nominatedNodeName"))


def _is_queued(pod: Mapping[str, Any]) -> bool:
    """Whether a scheduler that serves will place or refuse the pod (which has no node) in its turn.

    kube-scheduler says nothing of pods that it does not look at yet: gated ones, members of its own gangs
    whose peers do not exist, and those whose device claims nobody has made.
    """
    spec = pod["spec"]
    if spec.get("schedulingGates") or spec.get("schedulingGroup") or pod["metadata"].get("deletionTimestamp"):
        return False
    if _is_nominated(pod):
        return True
    made = {claim["name"] for claim in pod.get("status", {}).get("resourceClaimStatuses", ())}
    lacks_device = any(claim["name"] not in made for claim in spec.get("resourceClaims", ()))
    return not lacks_device and not _is_heard(pod)


def _is_stuck(pod: Mapping[str, Any], now: datetime) -> bool:
    """Whether the pod uses no room and will not soon: the scheduler has no place for it, or may not look for
    one. Room that it cannot have is others'. `Movement` tells of pods that nobody refuses."""
    if any(gate.get("name") != GATE for gate in pod["spec"].get("schedulingGates", ())):
        return True
    found = _scheduled(pod)
    since = parse_time(found.get("lastTransitionTime"))
    refused = found.get("status") == "False" and found.get("reason") == "Unschedulable"
    if _is_nominated(pod):
        return False
    return refused and since is not None and now - since > timedelta(seconds=STUCK_S)
