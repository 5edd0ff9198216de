"""People, programs and machines around the operator: jobs come and go, ranks die, nodes stop answering.

It acts by itself on every `tick`, by chance and by the clock, and keeps count of what each job may end as.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.operator.kube_json import ApiDown, KubeJson
from tests.operator.kubelet_double import KubeletDouble
from tests.support.jobs import job_json

Json = dict[str, Any]

MAX_MISCHIEF = 4
"""Per job: its budget for lost pods is 20, and every job must come to its end."""

PATIENCE = 0.85
"""Likelihood that an act waits for a job that runs."""

CODES = (137, 137, 1, 1, 82, 65)
"""Of ranks that end: killed, failed, lost its peers, and once in a while a failure that nothing helps."""


KEPT = 4
"""Finished jobs that stay to the end."""

SLEEPERS = 2
"""Jobs that are suspended once and never resumed."""


@dataclass(slots=True)
class Life:
    """One life of a job."""

    uid: str
    name: str
    mischief: int = 0
    elastic: bool = False
    may_fail: bool = False
    wakes_at: float | None = None
    """When a suspended job is resumed."""
    sleeps: bool = False
    """Suspended for good: what it leaves is judged at the end."""
    kept: bool = False
    """Finished and left alone, for the same reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Temper:
    """How much goes on."""

    jobs: int = 6
    """At once."""
    workers: tuple[int, ...] = (1, 2, 2, 3)
    pause_s: tuple[float, float] = (0.1, 0.5)
    """Between two acts."""
    weights: dict[str, int] = field(
        default_factory=lambda: {
            "rank ends": 6,
            "pod deleted": 2,
            "pod forced": 1,
            "suspend": 3,
            "job deleted": 2,
            "job replaced": 1,
            "node deaf": 1,
            "node full": 1,
            "drain": 1,
            "resize": 3,
        }
    )


class Nodes:
    """What befalls the doubles' nodes, each thing for a while."""

    def __init__(self, api: KubeJson, double: KubeletDouble, chance: random.Random) -> None:
        self._api, self._double, self._chance = api, double, chance
        self._restore: list[tuple[float, Callable[[], None]]] = []

    def heal(self, now: float) -> None:
        """Undo what has lasted long enough; `math.inf` undoes everything."""
        for due, restore in self._restore:
            if due <= now:
                restore()
        self._restore = [item for item in self._restore if item[0] > now]

    def deafen(self) -> bool:
        """Nodes do not answer: deleted pods stay Terminating until they are forced away."""
        self._double.obeys_sigterm = False
        self._restore.append((time.monotonic() + self._chance.uniform(0.5, 5), self._hear))
        return True

    def fill(self) -> bool:
        """No room: new pods stay Pending."""
        self._double.start_up = False
        self._restore.append((time.monotonic() + self._chance.uniform(0.2, 2), self._empty))
        return True

    def drain(self) -> bool:
        """A node is cordoned for a while: the workers that it holds move, with all others of their jobs."""
        if len(self._double.nodes) == 1:
            return False
        node = self._chance.choice(self._double.nodes)
        nodes, self._double.nodes = self._double.nodes, tuple(n for n in self._double.nodes if n != node)
        self._cordon(node, True)

        def open_again() -> None:
            self._cordon(node, False)
            self._double.nodes = nodes

        self._restore.append((time.monotonic() + self._chance.uniform(2, 6), open_again))
        return True

    def _cordon(self, node: str, closed: bool) -> None:
        self._api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": closed}})

    def _hear(self) -> None:
        self._double.obeys_sigterm = True

    def _empty(self) -> None:
        self._double.start_up = True


class Gremlin:
    """`tick` it often; `rest` before the end."""

    def __init__(
        self, api: KubeJson, namespace: str, double: KubeletDouble, chance: random.Random, temper: Temper
    ) -> None:
        self._api, self._namespace, self._double, self._chance = api, namespace, double, chance
        self._temper = temper
        self._jobs = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.lives: dict[str, Life] = {}
        """All that ever were, by UID."""
        self.acts: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        """Jobs that came to their end, by phase."""
        self._due = 0.0
        self._number = 0
        self._nodes = nodes = Nodes(api, double, chance)
        self._acts: dict[str, Callable[[Life, list[Json]], bool]] = {
            "rank ends": self._end_rank,
            "pod deleted": lambda life, pods: self._delete_pod(pods, grace_s=30),
            "pod forced": lambda life, pods: self._delete_pod(pods, grace_s=0),
            "suspend": lambda life, pods: self._suspend(life),
            "job deleted": lambda life, pods: self._delete_job(life, again=False),
            "job replaced": lambda life, pods: self._delete_job(life, again=True),
            "node deaf": lambda life, pods: nodes.deafen(),
            "node full": lambda life, pods: nodes.fill(),
            "drain": lambda life, pods: nodes.drain(),
            "resize": lambda life, pods: self._resize(life),
        }

    def tick(self) -> None:
        """What time has brought, and perhaps one act more."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._chance.uniform(*self._temper.pause_s)
        with suppress(ApiDown):
            self._nodes.heal(now)
            jobs = self._api.get(self._jobs)["items"]
            self._tend(jobs, now)
            self._misbehave(jobs)

    def rest(self) -> None:
        """Everything works again, and nobody is suspended."""
        self._nodes.heal(math.inf)
        for life in self.lives.values():
            if life.wakes_at is not None:
                self._resume(life)

    def live_jobs(self) -> list[Json]:
        return list(self._api.get(self._jobs)["items"])

    def _tend(self, jobs: list[Json], now: float) -> None:
        """Resume, take away what is finished, keep up the number."""
        for job in jobs:
            life = self.lives[job["metadata"]["uid"]]
            if life.wakes_at is not None and now >= life.wakes_at:
                self._resume(life)
            phase = job.get("status", {}).get("phase", "")
            if phase in ("Completed", "Failed") and not self._keeps(life):
                self.note_end(life, phase)
                self._api.delete(f"{self._jobs}/{life.name}", life.uid)
        resting = sum(self._rests(self.lives[job["metadata"]["uid"]]) for job in jobs)
        for _ in range(self._temper.jobs + resting - len(jobs)):
            self._create(f"j{self._number % self._temper.jobs}-{self._number // 12}")
            self._number += 1

    def _keeps(self, life: Life) -> bool:
        """Whether a finished job stays; the first few do."""
        life.kept = life.kept or sum(other.kept for other in self.lives.values()) < KEPT
        return life.kept

    @staticmethod
    def _rests(life: Life) -> bool:
        return life.kept or life.sleeps

    def note_end(self, life: Life, phase: str) -> None:
        self.ended[phase if phase == "Completed" or life.may_fail else f"{phase} ({life.name})"] += 1

    def _create(self, name: str) -> None:
        changes = {
            "metadata": {"name": name, "namespace": self._namespace},
            "spec.workers": self._chance.choice(self._temper.workers),
            "spec.failurePolicy.maxRestarts": 100,
            "spec.runPolicy.terminationTimeoutSeconds": 3,
            "spec.checkpoint.gracePeriodSeconds": 10,
        }
        elastic = self._chance.random() < 0.5
        if elastic:
            changes |= {"spec.elastic.minWorkers": 1, "spec.elastic.maxWorkers": 4}
        if self._chance.random() < 0.3:
            # The doubles' nodes, for the gang; the scheduler itself stays away for want of the volume.
            accepted = [{"key": "zerotrain.dev/double", "operator": "Exists"}]
            changes |= {"spec.scheduling.gang": "Operator", "spec.scheduling.tolerations": accepted}
        made = self._api.post(self._jobs, job_json(changes), exists_ok=True)
        if made:  # otherwise its namesake is not quite gone
            uid = made["metadata"]["uid"]
            self.lives[uid] = Life(uid, name, elastic=elastic)

    def _misbehave(self, jobs: list[Json]) -> None:
        open_ = [job for job in jobs if not job.get("status", {}).get("completionTime")]
        if self._chance.random() < PATIENCE:  # else most jobs go before they ever run
            open_ = [job for job in open_ if job.get("status", {}).get("phase") == "Running"]
        lives = [self.lives[job["metadata"]["uid"]] for job in open_]
        fit = [
            life
            for life in lives
            if life.mischief < MAX_MISCHIEF and life.wakes_at is None and not self._rests(life)
        ]
        if not fit:
            return
        life = self._chance.choice(fit)
        weights = self._temper.weights
        act = self._chance.choices(list(weights), list(weights.values()))[0]
        pods = self._api.get(f"{self._pods}?labelSelector=zerotrain.dev/job-uid={life.uid}")["items"]
        if self._acts[act](life, pods):
            life.mischief += 1
            self.acts[act] += 1

    def _end_rank(self, life: Life, pods: list[Json]) -> bool:
        running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        if not running:
            return False
        name, code = self._chance.choice(running)["metadata"]["name"], self._chance.choice(CODES)
        life.may_fail = life.may_fail or code == 65
        with suppress(StopIteration):  # it has just ended by itself
            self._double.end(name, code)
        return True

    def _delete_pod(self, pods: list[Json], *, grace_s: int) -> bool:
        if not pods:
            return False
        meta = self._chance.choice(pods)["metadata"]
        self._api.delete(f"{self._pods}/{meta['name']}", meta["uid"], grace_s=grace_s)
        return True

    def _suspend(self, life: Life) -> bool:
        self._edit(life, {"suspend": True})
        if sum(other.sleeps for other in self.lives.values()) < SLEEPERS:
            life.sleeps = True
        else:
            life.wakes_at = time.monotonic() + self._chance.uniform(0.2, 3)
        return True

    def _resume(self, life: Life) -> None:
        life.wakes_at = None
        self._edit(life, {"suspend": False})

    def _edit(self, life: Life, spec: Json) -> None:
        try:
            self._api.patch(f"{self._jobs}/{life.name}", {"metadata": {"uid": life.uid}, "spec": spec})
        except RuntimeError as error:
            if "metadata.uid" not in str(error):  # its name is another job's by now
                raise

    def _delete_job(self, life: Life, *, again: bool) -> bool:
        """With `again` it is made anew at once: the new job meets the old one's pods."""
        self._api.delete(f"{self._jobs}/{life.name}", life.uid)
        if again:
            self._create(life.name)
        return True

    def _resize(self, life: Life) -> bool:
        if life.elastic:
            self._edit(life, {"workers": self._chance.choice((1, 2, 4))})
        return life.elastic
