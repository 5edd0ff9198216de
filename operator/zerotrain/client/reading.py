"""`JobReader`: read-only operations on jobs. `cluster.Client` adds logs, and what changes jobs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeAlias

from zerotrain.client import scrape
from zerotrain.client.errors import JobNotFoundError, NotFoundError
from zerotrain.client.job import Job
from zerotrain.client.kubeconfig import find_server
from zerotrain.client.observed import Event, JobProgress, MetricFamily, Pod
from zerotrain.client.transport import Listing, Transport
from zerotrain.client.waiting import changes, wait_for
from zerotrain.client.watching import Watched, log_warning
from zerotrain.operator.constants import GROUP, KIND, LABEL_JOB, PLURAL, VERSION

# Aliases, since inside the class `list` is a method.
Jobs: TypeAlias = list[Job]
Events: TypeAlias = list[Event]
Pods: TypeAlias = list[Pod]
Families: TypeAlias = list[MetricFamily]


class JobReader:
    """Read-only client for the jobs of one namespace."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace

    @classmethod
    def connect(
        cls,
        kubeconfig: Path | str | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> Self:
        """Connect as kubectl does: KUBECONFIG, its current context and namespace, unless given; in a pod, the
        service account. No request is sent to the cluster yet. Raises KubeconfigError."""
        server = find_server(kubeconfig, context)
        return cls(Transport(server), namespace or server.namespace)

    def get(self, name: str) -> Job:
        """Return the job of this name. Raises JobNotFoundError, with similar names."""
        try:
            return Job.of(self._transport.get(job_path(self.namespace, name), what=f"job {name}"))
        except NotFoundError as error:
            raise self.no_such_job(name) from error

    def list(self, all_namespaces: bool = False, selector: str | None = None) -> Jobs:
        """Return all jobs, sorted by namespace and name."""
        path = job_path(None if all_namespaces else self.namespace)
        query = {"labelSelector": selector} if selector else {}
        found = [Job.of(item) for item in Listing(self._transport, path, query, what="jobs")]
        return sorted(found, key=lambda job: (job.namespace, job.name))

    def wait(self, name: str, *, until: str = "complete", timeout_s: float | None = None) -> Job:
        """Wait until a condition holds: complete, failed, finished, running, suspended, deleted, step=N, or
        TYPE[=STATUS] of status.conditions. Raises WaitTimeoutError, JobFailedError, JobNotFoundError."""
        self.get(name)  # a wrong name is reported with similar names
        return wait_for(self.watch(name, timeout_s=timeout_s), name, until=until, timeout_s=timeout_s)

    def watch(self, name: str, *, timeout_s: float | None = None) -> Iterator[Job | None]:
        """Iterate over the job's states: now and after every change, until the time is over; None once it is
        deleted."""
        return changes(self._transport, job_path(self.namespace), name, timeout_s=timeout_s)

    def watch_list(
        self,
        names: Sequence[str] = (),
        *,
        all_namespaces: bool = False,
        selector: str | None = None,
        known: Iterable[str] = (),
        on_problem: Callable[[str], None] | None = None,
    ) -> Iterator[dict[str, Job | None]]:
        """Iterate over jobs by `namespace/name`: first all of them (or those of these names), then those that
        change; None for deleted ones, including those of `known` that do not exist. The watch outlives an API
        server that is unavailable, which is reported once to `on_problem`. Raises ClientError where waiting
        does not help."""
        path = job_path(None if all_namespaces else self.namespace)
        query = {"labelSelector": selector} if selector else {}
        query |= {"fieldSelector": f"metadata.name={names[0]}"} if len(names) == 1 else {}
        watched = Watched(
            self._transport, path, query, what="jobs", known=known, on_problem=on_problem or log_warning
        )
        for batch in watched.batches():
            yield {
                key: Job.of(raw) if raw is not None else None
                for key, raw in batch.items()
                if not names or key.partition("/")[2] in names
            }

    def events(self, name: str, *, pods: bool = False) -> Events:
        """Return the events about the job, oldest first; with `pods` also those about its pods."""
        uid = self.get(name).uid
        path, what = f"/api/v1/namespaces/{self.namespace}/events", f"events of {name}"
        about_job = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.uid={uid}"}
        found = [Event.of(item) for item in Listing(self._transport, path, about_job, what=what)]
        if pods:
            theirs = Listing(self._transport, path, {"fieldSelector": "involvedObject.kind=Pod"}, what=what)
            mine = re.compile(rf"{re.escape(name)}-\d+-(\d+|[a-z]+-\d+)")
            found += [event for event in map(Event.of, theirs) if mine.fullmatch(event.name)]
        return sorted(found, key=lambda event: event.time.timestamp() if event.time else 0.0)

    def pods(self, name: str, attempt: int | None = None) -> Pods:
        """Return the existing pods of the job, of all attempts unless given: workers by index, then
        helpers."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        query = {"labelSelector": f"{LABEL_JOB}={name}"}
        found = [Pod.of(item) for item in Listing(self._transport, path, query, what="pods")]
        kept = [pod for pod in found if attempt is None or pod.attempt == attempt]
        return sorted(kept, key=lambda pod: (pod.worker is None, pod.attempt, pod.worker or 0, pod.name))

    def config_map(self, name: str) -> dict[str, str]:
        """Return the texts of a ConfigMap: stacks after a hang, lines of a failure. Raises NotFoundError."""
        path = f"/api/v1/namespaces/{self.namespace}/configmaps/{name}"
        data = self._transport.get(path, what=f"ConfigMap {name}").get("data") or {}
        return {str(key): str(text) for key, text in data.items()}

    def progress(self, name: str) -> JobProgress:
        """Return the present progress of every rank, requested from the workers themselves. Raises
        WorkerError if none of them runs or answers."""
        return scrape.progress(self._transport, self.pods(name), name)

    def metrics(self, name: str) -> Families:
        """Return the metrics of all running workers, as Prometheus scrapes them. Raises WorkerError."""
        return scrape.metrics(self._transport, self.pods(name), name)

    @property
    def transport(self) -> Transport:
        """The connection to the API server, for operations without a method of this class."""
        return self._transport

    def no_such_job(self, name: str) -> JobNotFoundError:
        """Return the error about a name, with similar names."""
        names = [job.name for job in self.list()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            step = f"did you mean {' or '.join(near)}?"
        elif names:
            step = f"jobs here are {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}"
        else:
            step = "the namespace has no jobs; zerotrain get -A lists those of all namespaces"
        return JobNotFoundError(f"there is no job {name} in namespace {self.namespace}", next_step=step)


def job_path(namespace: str | None, name: str | None = None) -> str:
    """Return the path of one job, of all jobs of a namespace, or of all jobs."""
    place = f"/namespaces/{namespace}" if namespace is not None else ""
    return f"/apis/{GROUP}/{VERSION}{place}/{PLURAL}{f'/{name}' if name is not None else ''}"
