"""All worker pods in memory, by the namespace and UID of their job, reduced to what reconcile reads.

The reflector and the answers to the operator's own creations fill it, so that a pass right after a creation
does not miss the new pods. Resource versions decide which of two views is newer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from zerotrain.operator.constants import LABEL_JOB, MAX_WORKERS
from zerotrain.operator.reconcile import PodView, job_uid_of, pod_view

log = logging.getLogger(__name__)

HELPERS = 8
"""Pods of a job beside its workers that are kept in any case."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """Namespace and name of a job; the UID tells apart jobs that have had this name."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class _Entry:
    view: PodView
    version: int


@dataclass(slots=True)
class _Pods:
    key: JobKey
    present: dict[str, _Entry] = field(default_factory=dict)
    """Entries of the pods that exist, by UID."""
    gone: dict[str, PodView] = field(default_factory=dict)
    starting: int = 0
    """Number of pods that are neither ready nor ending."""
    ending: int = 0
    """Number of pods that ended or are being deleted."""
    attempt: int = 0
    workers: int = MAX_WORKERS
    """Number of workers of this attempt; the maximum until it is known."""

    @property
    def most(self) -> int:
        """Return the maximum of views that are kept: those of the workers, twice, and HELPERS. A user who may
        create pods could otherwise fill the memory with pods that carry the job's labels and name it as their
        owner."""
        return 2 * self.workers + HELPERS

    def has_capacity_for(self, view: PodView) -> bool:
        """Return whether a pod that is not known yet is kept; a worker of the attempt always is."""
        if len(self.present) < self.most:
            return True
        return view.helper is None and view.attempt == self.attempt and view.index < self.workers

    def keep(self, uid: str, entry: _Entry) -> None:
        self._count(self.present.get(uid), -1)
        self._count(entry, 1)
        self.present[uid] = entry

    def drop(self, uid: str) -> _Entry | None:
        entry = self.present.pop(uid, None)
        self._count(entry, -1)
        return entry

    def is_on(self, node: str) -> bool:
        return any(entry.view.node == node for entry in self.present.values())

    def _count(self, entry: _Entry | None, number: int) -> None:
        if entry is None:
            return
        if entry.view.deletion_at is not None or entry.view.ended:
            self.ending += number
        elif not entry.view.ready:
            self.starting += number


def owner_key(namespace: str, uid: str) -> str:
    """Return the key of a job in the store. The namespace belongs to it since an ownerReference is not
    verified: one from another namespace is forged."""
    return f"{namespace}/{uid}"


class Sight:
    """Namespaces whose pods are known, and since when (None: all namespaces). The reflector that lists the
    pods reports it."""

    def __init__(self) -> None:
        self._since: dict[str | None, datetime] = {}

    def since(self, namespace: str) -> datetime | None:
        """Return the time since which the namespace's pods are known. None while they are not: then the
        store's view of them is incomplete."""
        whole = self._since.get(None)
        return whole if whole is not None else self._since.get(namespace)

    def gained(self, namespace: str | None, *, now: datetime) -> bool:
        """Record that a full list has arrived. Return whether the namespace was unknown before."""
        return self._since.setdefault(namespace, now) is now

    def lost(self, namespace: str | None) -> None:
        """Record that the pods may no longer be read."""
        self._since.pop(namespace, None)


class PodStore:
    """Store of all pods. Not thread-safe: one event loop owns it. `owner` is an `owner_key`."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Pods] = {}
        self._on_node: dict[str, set[str]] = {}
        """Owners by node, including those whose pods left it since the last `prune`. An outage of a zone
        reports a thousand nodes at once, and none of these may cost a search of all pods."""
        self.sight = Sight()

    def put(self, pod: Mapping[str, Any], *, now: datetime) -> JobKey | None:
        """Take a newer view of a pod. Return the key of its job if that changed anything."""
        owner = _owner_of(pod)
        view = _readable(pod, now) if owner is not None else None
        if owner is None or view is None:
            return None
        pods = self._jobs.get(owner)
        if pods is None:
            meta = pod["metadata"]
            pods = self._jobs[owner] = _Pods(JobKey(meta["namespace"], meta["labels"].get(LABEL_JOB, "")))
        old, version = pods.present.get(view.uid), version_of(pod)
        if view.uid in pods.gone or (old is not None and version <= old.version):
            return None
        if old is None and not pods.has_capacity_for(view):
            return None
        if old is not None:
            view = _since(old.view, view)
        pods.keep(view.uid, _Entry(view, version))
        if view.node is not None:
            self._on_node.setdefault(view.node, set()).add(owner)
        return pods.key if old is None or old.view != view else None

    def remove(self, pod: Mapping[str, Any], *, now: datetime) -> JobKey | None:
        """Remove a deleted pod. Its last view stays, since it may show how the program ended. Return the key
        of its job if the pod was known."""
        self.put(pod, now=now)
        owner = _owner_of(pod)
        return self._bury(owner, pod["metadata"]["uid"]) if owner is not None else None

    def retain(self, listed: Set[str], *, version: int, namespace: str | None = None) -> set[JobKey]:
        """Remove the pods whose UIDs are not in `listed`, the complete list as of `version`, of one namespace
        or of all. Return the keys of their jobs."""
        changed: set[JobKey | None] = set()
        for owner, held in list(self._jobs.items()):
            if namespace not in (None, held.key.namespace):
                continue
            # A pod that is newer than the list was created while the list was in transit.
            lost = [
                uid for uid, entry in held.present.items() if uid not in listed and entry.version <= version
            ]
            changed.update(self._bury(owner, uid) for uid in lost)
        return {key for key in changed if key is not None}

    def of_job(self, owner: str) -> tuple[tuple[PodView, ...], tuple[PodView, ...]]:
        """Return the workers that exist, and the last views of those that are gone."""
        pods = self._jobs.get(owner)
        if pods is None:
            return (), ()
        present = tuple(entry.view for entry in pods.present.values() if entry.view.helper is None)
        return present, tuple(view for view in pods.gone.values() if view.helper is None)

    def helpers_of(self, owner: str) -> tuple[PodView, ...]:
        """Return the pods of the job that exist and are no workers."""
        pods = self._jobs.get(owner)
        if pods is None:
            return ()
        return tuple(entry.view for entry in pods.present.values() if entry.view.helper is not None)

    def all_start_well(self, owner: str) -> bool:
        """Return whether pods of the job are starting, none ended or went, and some are not ready yet."""
        pods = self._jobs.get(owner)
        return pods is not None and pods.starting > 0 and not pods.ending and not pods.gone

    def newest_attempt(self, owner: str) -> int:
        """Return the latest attempt that has pods; 0 without pods. If it is later than that of the job, the
        view of the job is stale."""
        pods = self._jobs.get(owner)
        return max((entry.view.attempt for entry in pods.present.values()), default=0) if pods else 0

    def on_node(self, name: str) -> set[JobKey]:
        """Return the keys of the jobs that have a pod on the node."""
        found = (self._jobs.get(owner) for owner in self._on_node.get(name, ()))
        return {pods.key for pods in found if pods is not None and pods.is_on(name)}

    def expect(self, owner: str, *, attempt: int, workers: int) -> None:
        """Record the job's attempt and number of workers, and drop the last views of attempts that are
        over."""
        pods = self._jobs.get(owner)
        if pods is None:
            return
        pods.attempt, pods.workers = attempt, workers
        if pods.gone:
            pods.gone = {uid: view for uid, view in pods.gone.items() if view.attempt >= attempt}

    def forget(self, owner: str) -> None:
        """Forget a job that is gone."""
        self._jobs.pop(owner, None)

    def prune(self, alive: Set[str]) -> None:
        """Drop jobs that are not among `alive` and have no pods: late events brought them back."""
        self._jobs = {owner: pods for owner, pods in self._jobs.items() if owner in alive or pods.present}
        self._on_node = {}
        for owner, pods in self._jobs.items():
            for entry in pods.present.values():
                if entry.view.node is not None:
                    self._on_node.setdefault(entry.view.node, set()).add(owner)

    def _bury(self, owner: str, pod_uid: str) -> JobKey | None:
        pods = self._jobs.get(owner)
        entry = pods.drop(pod_uid) if pods is not None else None
        if pods is None or entry is None:
            return None
        pods.gone[pod_uid] = entry.view
        while len(pods.gone) > pods.most:
            pods.gone.pop(next(iter(pods.gone)))
        return pods.key


def _owner_of(pod: Mapping[str, Any]) -> str | None:
    uid = job_uid_of(pod)
    return owner_key(pod["metadata"]["namespace"], uid) if uid is not None else None


def _readable(pod: Mapping[str, Any], now: datetime) -> PodView | None:
    """Return the pod's view, or None if it cannot be read: what a tenant's program wrote into one pod must
    not stop the operator for all others."""
    try:
        return pod_view(pod, seen_at=now)
    except Exception:
        name, namespace = pod["metadata"].get("name"), pod["metadata"].get("namespace")
        log.exception("skipping pod %s/%s, which cannot be read", namespace, name)
        return None


def _since(old: PodView, new: PodView) -> PodView:
    """Return the new view. Times of a first sighting are kept from the old view."""
    if old.ended_seen_at is not None and new.ended:
        return replace(new, ended_seen_at=old.ended_seen_at)
    if old.refused_seen_at is not None and new.refused_seen_at is not None:
        return replace(new, refused_seen_at=old.refused_seen_at)
    if old.ignored_seen_at is not None and new.ignored_seen_at is not None:
        return replace(new, ignored_seen_at=old.ignored_seen_at)
    return new


def version_of(item: Mapping[str, Any]) -> int:
    """Return the resource version as a number; 0 when it is none, which makes every other view newer.

    Kubernetes declares them comparable since 1.35 and has always kept them so.
    """
    text = item.get("metadata", {}).get("resourceVersion", "")
    return int(text) if text.isdigit() else 0
