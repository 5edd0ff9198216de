"""A small cluster on a simulated clock, one elastic job in it, and an operator that may die at any action.

It plays histories of days: nodes fail, are cordoned and come back, ranks fail, users suspend, resume and
resize, pods are deleted and evicted, watches lag, status writes are lost. Passes happen only as in
production: after an event that the operator can see, at the time that it asked to be woken, a second after
actions. There is no resync here, so a decision that does not schedule its next pass stops progress and is
found.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from tests.operator.reconcile_builders import NOW, ended, job, last_words, pending, progress, running
from zerotrain.operator.reconcile import (
    Capacity,
    CreateWorkers,
    DeletePods,
    DeleteWorkers,
    NodeView,
    Observed,
    Plan,
    PodView,
    ProtectWorkers,
    ReadCapacity,
    RequestYield,
    UnprotectWorkers,
    YieldState,
    reconcile,
)
from zerotrain.operator.reconcile.observe import Protection

SLOTS = 2
"""Workers that a node holds."""

STEP_S = 2.0
EVERY = 50
"""Steps between two checkpoints."""

TOTAL = 1_000_000
GRACE_S = 60


@dataclass(slots=True)
class Machine:
    """One node."""

    alive: bool = True
    cordoned: bool = False
    not_ready_since: datetime | None = None

    @property
    def open(self) -> bool:
        return self.ready and not self.cordoned

    @property
    def ready(self) -> bool:
        """Whether the control plane gets heartbeats of the node. Without them, programs run on if the node is
        alive.
        """
        return self.alive and self.not_ready_since is None


@dataclass(slots=True)
class Program:
    """The ranks of one attempt: they step together, or not at all."""

    first: int
    joined_at: datetime | None = None
    stops_at: datetime | None = None
    """Time at which the ranks have checkpointed and stop, after a request to stop."""
    broken: bool = False
    step: int = 0
    durable: int = 0
    reported_step: int = 0
    """Durable step in the termination messages of pods that stayed until the operator deleted them."""


@dataclass(slots=True)
class Scratch:
    """State that the operator loses when it dies."""

    synced_at: datetime
    gone: list[PodView] = field(default_factory=list)
    yielding: YieldState | None = None
    capacity: Capacity | None = None
    protection: Protection | None = None
    last_responses: dict[str, datetime] = field(default_factory=dict)


class DayWorld:
    """The cluster and the operator around `reconcile`."""

    def __init__(self, chance: random.Random, *, nodes: int = 3, spec: dict[str, Any] | None = None) -> None:
        self.chance, self.now = chance, NOW
        elastic = {"minWorkers": 1, "maxWorkers": 4, "shrinkAfterSeconds": 60, "growAfterSeconds": 120}
        base = {
            "workers": 2,
            "elastic": elastic,
            "failurePolicy": {"maxRestarts": 1000, "windowSeconds": 600},
        }
        self.job = job(spec={**base, "steps": TOTAL, **(spec or {})})
        self.machines = {f"node-{number}": Machine() for number in range(nodes)}
        self.pods: dict[str, PodView] = {}
        self.seen: dict[str, PodView] = {}
        """Pods as the operator's watch has shown them."""
        self.lagging = False
        self.programs: dict[int, Program] = {}
        self.durable = 0
        self.names: set[str] = set()
        self.budgets: set[int] = set()
        self.scratch = Scratch(synced_at=NOW)
        self.excuses = 1
        """Number of attempts that an event justifies."""
        self.wake_at: datetime | None = NOW
        self.writes = self.passes = 0

    # The operator's view and actions

    def run_operator(self, *, dies_after: int | None = None, loses: str = "") -> None:
        """Run all passes that are due now.

        `dies_after`: number of actions of a pass after which the operator dies; `loses`: a status write that
        fails, either `refused` by a conflict, or `unanswered` though it was stored.
        """
        for _ in range(20):
            if not self._due():
                return
            self.wake_at = None
            plan = self._pass()
            self.passes += 1
            if plan.status is not None and loses == "refused":
                self.wake_at, loses = self.now, ""
                continue
            self._store(plan)
            if loses == "unanswered":
                self.wake_at, loses = self.now, ""
                continue
            for action in plan.actions[:dies_after]:
                self._perform(action)
            if dies_after is not None:
                self.restart_operator()
                dies_after = None
                continue
            if plan.actions:
                self.wake_at = self.now + timedelta(seconds=1)
            if plan.wake_at is not None:
                self.wake_at = min(self.wake_at or plan.wake_at, plan.wake_at)
            acked = self.scratch.yielding is not None and self.scratch.yielding.acked_at is not None
            if acked and any(isinstance(action, RequestYield) for action in plan.actions):
                self.wake_at = self.now
        raise AssertionError(f"passes without an end at {self.now}: {self.describe()}")

    def restart_operator(self) -> None:
        self.scratch = Scratch(synced_at=self.now)
        self.seen, self.lagging, self.wake_at = dict(self.pods), False, self.now

    def _due(self) -> bool:
        if not self.lagging and self.seen != self.pods:
            self._hear()
            return True
        return self.wake_at is not None and self.wake_at <= self.now

    def _hear(self) -> None:
        """Deliver the watch's events about pods."""
        self.scratch.gone += [pod for name, pod in self.seen.items() if self.pods.get(name) is None]
        news = {
            name: replace(pod, ended_seen_at=self.now) if pod.ended and pod.ended_seen_at is None else pod
            for name, pod in self.pods.items()
        }
        self.pods = dict(news)
        self.seen = news

    def _pass(self) -> Plan:
        scratch, attempt = self.scratch, self.attempt
        program = self.programs.get(attempt)
        known = None
        if program is not None and program.joined_at is not None and not program.broken:
            at = self.now.timestamp()
            known = replace(
                progress(program.step, attempt, saved=program.durable or None), step_at=at, heartbeat_at=at
            )
        observed = Observed(
            pods=tuple(self.seen.values()),
            gone=tuple(scratch.gone),
            synced_at=scratch.synced_at,
            progress=known,
            yielding=scratch.yielding,
            protection=scratch.protection,
            capacity=scratch.capacity,
            nodes=self._nodes(),
            last_responses=self._last_responses(),
        )
        plan = reconcile(self.job, observed, self.now)
        self._check_that_it_ends(plan, observed)
        return plan

    def _check_that_it_ends(self, plan: Plan, observed: Observed) -> None:
        """Check that a pass without a wake-up leaves nothing to do: its own write brings no event."""
        if plan.status is None or plan.actions or plan.wake_at is not None:
            return
        stored = plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        again = reconcile({**self.job, "status": stored}, observed, self.now)
        left = stored
        if again.status is not None:
            left = again.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        late = {name: (stored.get(name), left.get(name)) for name in left if stored.get(name) != left[name]}
        assert not late, f"would follow at once: {late}"
        assert not again.actions, f"{again.actions} would follow at once after {plan.status.phase}"

    def _nodes(self) -> dict[str, NodeView]:
        used = {pod.node for pod in self.seen.values()}
        return {
            name: NodeView(
                name=name,
                ready=machine.ready,
                not_ready_since=machine.not_ready_since,
                learned_at=machine.not_ready_since and max(machine.not_ready_since, self.scratch.synced_at),
                unschedulable=machine.cordoned,
            )
            for name, machine in self.machines.items()
            if name in used and not machine.open
        }

    def _last_responses(self) -> dict[str, datetime]:
        """Return the workers on not-ready nodes that answered, each asked some seconds after the operator
        knew.
        """
        for pod in self.pods.values():
            machine = self.machines.get(pod.node or "")
            since = machine.not_ready_since if machine is not None and machine.alive else None
            if since is not None and pod.started and not pod.ended:
                asked_at = max(since, self.scratch.synced_at) + timedelta(seconds=5)
                if self.now >= asked_at:
                    self.scratch.last_responses[str(pod.node)] = self.now
        return dict(self.scratch.last_responses)

    def _capacity_hint(self, workers: int) -> Capacity:
        fits = sum(self._free(name) for name in self.machines) + sum(
            1 for pod in self.pods.values() if pod.node is not None and self.machines[pod.node].open
        )
        return Capacity(at=self.now, workers=workers, fits=fits)

    def _store(self, plan: Plan) -> None:
        if plan.status is None:
            return
        self.writes += 1
        old, new = self.status, plan.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        before, after = old.get("attempt", 0), new["attempt"]
        assert after in (before, before + 1), f"attempt {after} follows {before}"
        if after != before:
            assert not self.pods, f"attempt {after} was decided on while {sorted(self.pods)} existed"
            assert after <= self.excuses, f"attempt {after} for {self.excuses} reasons: {self.describe()}"
        if new["phase"] == "Suspended" and old.get("phase") != "Suspended":
            assert not self.pods, f"suspended while {sorted(self.pods)} exist"
            last, program = (new["checkpoint"].get("last") or {}).get("step", 0), self.programs.get(after)
            assert program is None or last >= program.reported_step, (
                f"knows step {last}, {program.reported_step} was reported"
            )
        charged = [item["attempt"] for item in new["restarts"]["recent"]]
        assert len(charged) == len(set(charged)), f"charged twice: {charged}"
        self.job = {**self.job, "status": new}
        self.scratch.gone = [pod for pod in self.scratch.gone if pod.attempt >= after]

    def _perform(self, action: object) -> None:
        match action:
            case CreateWorkers(attempt=attempt, indices=indices):
                for index in indices:
                    self._create(index, attempt)
            case DeleteWorkers(attempt=attempt, grace_s=grace_s, spared=spared, ended=ended):
                for pod in list(self.pods.values()):
                    if pod.attempt == attempt and pod.index != spared and (ended or not pod.ended):
                        self.delete(pod, GRACE_S if grace_s is None else grace_s)
            case DeletePods(names_uids=named, grace_s=grace_s):
                for name, uid in named:
                    if name in self.pods and self.pods[name].uid == uid:
                        self.delete(self.pods[name], grace_s)
            case RequestYield(attempt=attempt, pod=name):
                self._request_yield(attempt, name)
            case ReadCapacity(shape=shape):
                self.scratch.capacity = self._capacity_hint(shape.workers)
            case ProtectWorkers(attempt=attempt):
                self.budgets.add(attempt)
                self.scratch.protection = Protection(attempt=attempt, exists=True)
            case UnprotectWorkers(attempt=attempt):
                self.budgets.discard(attempt)
                self.scratch.protection = Protection(attempt=attempt, exists=False)

    def _create(self, index: int, attempt: int) -> None:
        assert attempt == self.attempt, "pods of an attempt that is not stored"
        assert index < self.status["shape"]["workers"], "a worker that the attempt does not have"
        others = [pod.name for pod in self.pods.values() if pod.attempt != attempt]
        assert not others, f"two attempts at once: {others} and {attempt}"
        pod = pending(index, attempt)
        if pod.name not in self.pods:
            if pod.name in self.names:
                assert not self.status["podsCreated"], f"the name {pod.name} was used before"
                pod = replace(pod, uid=f"{pod.uid}-again-{self.passes}")
            self.names.add(pod.name)
            self.pods[pod.name] = self.seen[pod.name] = pod
            self.programs.setdefault(attempt, Program(first=self.durable, step=self.durable))

    def _request_yield(self, attempt: int, name: str) -> None:
        pod, program = self.pods.get(name), self.programs.get(attempt)
        answers = pod is not None and pod.node is not None and self.machines[pod.node].alive and not pod.ended
        if not answers or program is None or self.chance.random() < 0.2:
            self.scratch.yielding = YieldState(attempt=attempt, error="no answer")
            return
        self.scratch.yielding = YieldState(attempt=attempt, acked_at=self.now)
        self._ask_to_stop(program)

    # Events in the cluster

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job["status"])

    @property
    def attempt(self) -> int:
        return int(self.status.get("attempt", 0))

    def edit(self, **spec: Any) -> None:
        generation = self.job["metadata"]["generation"] + 1
        meta = {**self.job["metadata"], "generation": generation}
        self.job = {**self.job, "metadata": meta, "spec": {**self.job["spec"], **spec}}
        self.wake_at = self.now

    def delete(self, pod: PodView, grace_s: int) -> None:
        if grace_s == 0 or (pod.node is None):
            self.remove(pod)
            return
        ends = self.now + timedelta(seconds=grace_s)
        ends = min(pod.deletion_at or ends, ends)
        self.pods[pod.name] = replace(pod, deletion_at=ends, deletion_grace_s=grace_s)
        program = self.programs.get(pod.attempt)
        if program is not None and grace_s > 5 and self.machines[pod.node].ready and not pod.ended:
            self._ask_to_stop(program)

    def remove(self, pod: PodView) -> None:
        if not pod.ended:
            self._break(pod.attempt)
        del self.pods[pod.name]

    def end(self, pod: PodView, code: int, **more: Any) -> None:
        if pod.ended or not pod.started:
            return
        program = self.programs[pod.attempt]
        if code not in (0, 75):
            program.broken = True
        words = last_words(code, pod.attempt, step=program.durable or None)
        if words.checkpoint is not None:
            words = replace(words, checkpoint=replace(words.checkpoint, time=self.now.timestamp()))
        if code == 75 and pod.deletion_at is None:
            program.reported_step = program.durable
        over = ended(pod.index, code, pod.attempt, termination=words, **more)
        moment = {"finished_at": self.now, "ended_seen_at": None, "node": pod.node, "uid": pod.uid}
        kept = {"deletion_at": pod.deletion_at, "deletion_grace_s": pod.deletion_grace_s}
        self.pods[pod.name] = replace(over, **moment, **kept)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        """Advance the cluster by so many seconds; the operator runs whenever it may."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            next_times = [end, self.now + timedelta(seconds=20 if seconds < 600 else 120)]
            next_times += [at for at in (self.wake_at, *self._timers()) if at is not None and at > self.now]
            self.now = min(next_times)
            self.live()
            self.run_operator()

    def _timers(self) -> list[datetime]:
        found = [pod.deletion_at for pod in self.pods.values() if pod.deletion_at is not None]
        found += [program.stops_at for program in self.programs.values() if program.stops_at is not None]
        return found

    def live(self) -> None:
        """Advance nodes and programs to the present."""
        for pod in list(self.pods.values()):
            self._live_pod(pod)
        program = self.programs.get(self.attempt)
        mine = [pod for pod in self.pods.values() if pod.attempt == self.attempt]
        if program is None or program.broken or not mine:
            return
        wanted = self.status["shape"]["workers"]
        up = [pod for pod in mine if pod.started and not pod.ended]
        ready_pods = [pod for pod in up if self.machines[str(pod.node)].ready]
        if program.joined_at is None and len(ready_pods) == wanted:
            program.joined_at = self.now
            for pod in up:
                self.pods[pod.name] = replace(pod, ready=True)
        if program.joined_at is None:
            return
        until = min(self.now, program.stops_at or self.now)
        gained = int((until - program.joined_at).total_seconds() / STEP_S)
        program.step = max(program.step, program.first + gained)
        program.durable = max(program.durable, program.step // EVERY * EVERY)
        if program.stops_at is not None and self.now >= program.stops_at:
            program.durable = program.step
            for pod in ready_pods:
                self.end(pod, 75)
        self.durable = max(self.durable, program.durable)

    def _live_pod(self, pod: PodView) -> None:
        if pod.node is None:
            free = [name for name, machine in self.machines.items() if machine.open and self._free(name)]
            if free and pod.deletion_at is None:
                started = running(pod.index, pod.attempt, node=self.chance.choice(free))
                self.pods[pod.name] = replace(started, uid=pod.uid)
            return
        if not self.machines[pod.node].ready:
            return  # a dead node carries out no request, nor does a kubelet that is away
        if pod.deletion_at is not None and (pod.ended or self.now >= pod.deletion_at):
            self.remove(pod)

    def _ask_to_stop(self, program: Program) -> None:
        if program.stops_at is None and program.joined_at is not None and not program.broken:
            program.stops_at = self.now + timedelta(seconds=self.chance.choice((1, 5, 30)))

    def _break(self, attempt: int) -> None:
        if attempt in self.programs:
            self.programs[attempt].broken = True

    def _free(self, name: str) -> int:
        if not self.machines[name].open:
            return 0
        return SLOTS - sum(1 for pod in self.pods.values() if pod.node == name)

    def describe(self) -> str:
        brief = {name: self.status.get(name) for name in ("phase", "attempt", "yieldRequest", "elastic")}
        failures = [item["reason"] for item in self.status.get("failures", ())]
        pods = [(pod.name, pod.state.value, pod.node) for pod in self.pods.values()]
        return f"{brief}, failures {failures}, pods {pods}"
