"""Users, programs and machines around the operator: jobs come and go, ranks die, nodes stop answering.

It acts on every `tick`, by chance and by the clock, and records the outcomes that each job may have.
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

from tests.cluster.chaos.bystanders import Queue, Readers
from tests.cluster.chaos.kinds import Traits, draw
from tests.cluster.chaos.nodes import Nodes
from tests.operator.kubelet_double import KubeletDouble
from tests.support.jobs import job_json
from tests.support.kube_json import ApiDown, KubeJson

Json = dict[str, Any]

MAX_MISCHIEF = 4
"""Largest number of faults per job: its budget for lost pods is 20, and every job must be able to end."""

PATIENCE = 0.85
"""Probability that an act waits for a running job."""

CODES = (137, 137, 1, 1, 82, 65)
"""Exit codes of failing ranks: killed, failed, peers lost, and now and then a permanent failure."""


KEPT = 4
"""Number of finished jobs that are kept to the end."""

SLEEPERS = 2
"""Number of jobs that are suspended once and never resumed."""


@dataclass(slots=True)
class Life:
    """One creation of a job, which may be deleted and made again."""

    uid: str
    name: str
    mischief: int = 0
    traits: Traits = field(default_factory=Traits)
    may_fail: bool = False
    wakes_at: float | None = None
    """Time at which a suspended job is resumed."""
    sleeps: bool = False
    """Whether the job stays suspended: its remaining objects are checked at the end."""
    kept: bool = False
    """Whether the job is kept after its end, for the same reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Temper:
    """Amount of activity."""

    jobs: int = 6
    """Number of jobs at once."""
    workers: tuple[int, ...] = (1, 2, 2, 3)
    pause_s: tuple[float, float] = (0.1, 0.5)
    """Seconds between two acts."""
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
            "hang": 3,
            "evicted by its queue": 4,
        }
    )


class FaultInjector:
    """Source of disturbances. Call `tick` often, and `rest` before the end."""

    def __init__(
        self, api: KubeJson, namespace: str, double: KubeletDouble, chance: random.Random, temper: Temper
    ) -> None:
        self._api, self._namespace, self._double, self._chance = api, namespace, double, chance
        self._temper = temper
        self._jobs = f"/apis/zerotrain.dev/v1alpha1/namespaces/{namespace}/zerotrainingjobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.lives: dict[str, Life] = {}
        """All jobs that ever existed, by UID."""
        self.acts: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        """Number of ended jobs by phase."""
        self._due = 0.0
        self._number = 0
        self._nodes = nodes = Nodes(api, double, chance)
        self._queue, self._readers = Queue(api, namespace, chance), Readers(api, namespace, chance)
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
            "hang": lambda life, pods: self._hang(life),
            "evicted by its queue": lambda life, pods: life.traits.queued and self._queue.evict(life.uid),
        }

    def tick(self) -> None:
        """Do what is due, and perhaps one more act."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._chance.uniform(*self._temper.pause_s)
        with suppress(ApiDown):
            self._nodes.heal(now)
            self.attend()
            jobs = self._api.get(self._jobs)["items"]
            self._tend(jobs, now)
            self._misbehave(jobs)

    def attend(self, *, patience: float = 0.5) -> None:
        """Run the queue and the readers, which work at all times."""
        with suppress(ApiDown):
            self._queue.tick(patience=patience)
            self._readers.tick()

    def pause(self) -> None:
        """Undo all faults and resume all suspended jobs."""
        self._nodes.heal(math.inf)
        for life in self.lives.values():
            if life.wakes_at is not None:
                self._resume(life)

    def live_jobs(self) -> list[Json]:
        return list(self._api.get(self._jobs)["items"])

    def _tend(self, jobs: list[Json], now: float) -> None:
        """Resume jobs, remove finished ones, and create new ones up to the wanted number."""
        for job in jobs:
            life = self.lives[job["metadata"]["uid"]]
            if life.wakes_at is not None and now >= life.wakes_at:
                self._resume(life)
            phase = job.get("status", {}).get("phase", "")
            waits = is_unread(job) and self._chance.random() < PATIENCE
            if phase in ("Completed", "Failed") and not waits and not self._keeps(life):
                self.note_end(life, phase)
                self._api.delete(f"{self._jobs}/{life.name}", life.uid)
        resting = sum(self._rests(self.lives[job["metadata"]["uid"]]) for job in jobs)
        for _ in range(self._temper.jobs + resting - len(jobs)):
            self._create(f"j{self._number % self._temper.jobs}-{self._number // 12}")
            self._number += 1

    def _keeps(self, life: Life) -> bool:
        """Return whether a finished job is kept, as the first few are."""
        life.kept = life.kept or sum(other.kept for other in self.lives.values()) < KEPT
        return life.kept

    @staticmethod
    def _rests(life: Life) -> bool:
        return life.kept or life.sleeps

    def note_end(self, life: Life, phase: str) -> None:
        self.ended[phase if phase == "Completed" or life.may_fail else f"{phase} ({life.name})"] += 1

    def _create(self, name: str) -> None:
        changes, traits = draw(self._chance, self._temper.workers)
        changes["metadata"] = {"name": name, "namespace": self._namespace}
        made = self._api.post(self._jobs, job_json(changes), exists_ok=True)
        if made:  # otherwise the previous job of this name still exists
            uid = made["metadata"]["uid"]
            self.lives[uid] = Life(uid, name, traits=traits)

    def _misbehave(self, jobs: list[Json]) -> None:
        open_ = [job for job in jobs if not job.get("status", {}).get("completionTime")]
        if self._chance.random() < PATIENCE:  # otherwise most jobs are deleted before they ever run
            open_ = [job for job in open_ if job.get("status", {}).get("phase") == "Running"]
        lives = [self.lives[job["metadata"]["uid"]] for job in open_]
        fit = [
            life
            for life in lives
            if life.mischief < MAX_MISCHIEF and life.wakes_at is None and not self._rests(life)
        ]
        if not fit:
            return
        weights = self._temper.weights
        act = self._chance.choices(list(weights), list(weights.values()))[0]
        for life in self._chance.sample(fit, len(fit)):  # not every act is possible for every job
            pods = self._api.get(f"{self._pods}?labelSelector=zerotrain.dev/job-uid={life.uid}")["items"]
            if self._acts[act](life, pods):
                life.mischief += 1
                self.acts[act] += 1
                return

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
        """Delete a pod that has not ended: the termination message of one that has may still be unread, and
        the judge expects what it says in the status.
        """
        alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        if not alive:
            return False
        meta = self._chance.choice(alive)["metadata"]
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
            if "metadata.uid" not in str(error):  # its name now belongs to another job
                raise

    def _delete_job(self, life: Life, *, again: bool) -> bool:
        """Delete a job.

        With `again`, create it anew at once, so that the new job meets the old one's pods.
        """
        self._api.delete(f"{self._jobs}/{life.name}", life.uid)
        if again:
            self._create(life.name)
        return True

    def _resize(self, life: Life) -> bool:
        if life.traits.elastic:
            self._edit(life, {"workers": self._chance.choice((1, 2, 4))})
        return life.traits.elastic

    def _hang(self, life: Life) -> bool:
        """Stop one rank as by SIGSTOP if the job has hang detection."""
        running = [training for training in self._double.trainings() if training.job_uid == life.uid]
        if not life.traits.detects_hangs or not running or not running[-1].can_stop:
            return False
        running[-1].stopped_rank = 0
        return True


def is_unread(job: Json) -> bool:
    """Return whether a completed job's checkpoint is still to be verified."""
    checkpoint, status = job["spec"].get("checkpoint", {}), job.get("status", {})
    wanted = checkpoint.get("verify") == "OnCompletion" and status.get("phase") == "Completed"
    known = status.get("checkpoint", {})
    state = (known.get("verification") or {}).get("state", "Running")
    return wanted and known.get("last") is not None and state == "Running"
