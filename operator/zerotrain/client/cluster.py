"""`Client`: jobs in a cluster, for programs, notebooks and the commands of `zerotrain`.

    from zerotrain.client import Client

    client = Client.connect(namespace="ml")
    job = client.submit("job.yaml")
    client.wait(job.name, until="complete", timeout_s=3600)

All requests go to the API server with the identity of the kubeconfig. Errors are those of `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerotrain.client import scrape
from zerotrain.client.errors import ConflictError, ForbiddenError, InvalidJobError, NotFoundError
from zerotrain.client.job import Job
from zerotrain.client.lenient_json import Fields
from zerotrain.client.log_stream import MAX_FOLLOWED, LogRequest
from zerotrain.client.logs import read_logs
from zerotrain.client.observed import LogLine
from zerotrain.client.reading import JobReader, job_path
from zerotrain.client.watching import log_warning
from zerotrain.operator.constants import API_VERSION, KIND

if TYPE_CHECKING:
    from zerotrain.client.diagnosis import Diagnosis
    from zerotrain.operator.api.planning import JobPlan


FIELD_OWNER = "zerotrain-client"
"""Name of this client as a field manager, in metadata.managedFields of what it wrote."""

REPLACE_TRIES = 10
"""Number of tries to replace a job, which may change between the read and the write."""


class Client(JobReader):
    """Client for the jobs of one namespace. Make it with `Client.connect`."""

    @staticmethod
    def plan(
        job: Mapping[str, Any] | Path | str, *, workers: int | None = None, config: Path | str | None = None
    ) -> JobPlan:
        """Return the operator's plan for a job, given as an object or a file: whether it fits, without a
        request to a cluster. `config`: the JSON file of the ConfigMap that spec.configFrom names. Raises
        JobFileError, ConfigSourceError."""
        # Imported late: the models of the spec take longer than most requests.
        from zerotrain.client.planning import plan

        return plan(job, workers=workers, config=config)

    def submit(
        self, job: Mapping[str, Any] | Path | str, *, dry_run: bool = False, replace: bool = False
    ) -> Job:
        """Create a job, given as an object or a file. With `dry_run` the API server only reports what it
        would do. With `replace` an existing job is changed to the new one, as far as its fields may change:
        fields that the file leaves out are removed, except for labels and annotations that another client has
        set.

        Raises JobFileError, InvalidJobError, ConflictError.
        """
        raw = _complete(_object_of(job), self.namespace)
        namespace, name = raw["metadata"]["namespace"], raw["metadata"]["name"]
        path, what = job_path(namespace), f"job {name}"
        if replace and (changed := self._replace(raw, dry_run=dry_run)) is not None:
            return changed
        try:
            return Job.of(self.transport.post(path, raw, _write_query(dry_run), what=what))
        except ConflictError as error:
            error.next_step = (
                f"change it with: zerotrain submit --replace; or delete it first: zerotrain delete {name}"
            )
            raise

    def _replace(self, raw: Mapping[str, Any], *, dry_run: bool) -> Job | None:
        """Replace an existing job. Return the new one; None if there is none to be replaced."""
        meta = raw["metadata"]
        path, what = job_path(meta["namespace"], meta["name"]), f"job {meta['name']}"
        query = _write_query(dry_run)
        for attempt in range(REPLACE_TRIES):
            try:
                old = self.transport.get(path, what=what)
            except NotFoundError:
                return None
            try:
                return Job.of(self.transport.put(path, merged_over(old, raw, FIELD_OWNER), query, what=what))
            except ConflictError:
                # The operator writes the status of a running job all the time.
                if attempt == REPLACE_TRIES - 1:
                    raise
        return None

    def delete(self, name: str, *, dry_run: bool = False) -> None:
        """Delete the job and everything it owns, such as pods and kept logs; its checkpoints stay. With
        `dry_run` the API server only reports whether it would."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        body |= {"dryRun": ["All"]} if dry_run else {}
        try:
            self.transport.delete(job_path(self.namespace, name), body, what=f"job {name}")
        except NotFoundError as error:
            raise self.no_such_job(name) from error

    def logs(
        self,
        name: str,
        *,
        ranks: Sequence[int] | None = None,
        attempt: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        max_followed: int = MAX_FOLLOWED,
        on_problem: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Iterate over the lines of all ranks, or of `ranks`, of the current attempt unless given. If the
        pods are gone, the lines that the operator kept of the failure are returned. `tail`: the last lines of
        each worker (of each rank if `ranks` is given). `follow` goes on into later attempts, with at most
        `max_followed` workers at once. A pod whose log cannot be read is reported to `on_problem` (by default
        the logger of this package), and the others go on. Raises NoLogsError, TooManyLogsError."""
        request = LogRequest(
            ranks=frozenset(ranks) if ranks is not None else None,
            attempt=attempt,
            follow=follow,
            tail=tail,
            max_followed=max_followed,
            on_problem=on_problem or log_warning,
        )
        return read_logs(self, name, request)

    def describe(self, name: str) -> Diagnosis:
        """Return the state of the job, its history and advice. Only the job itself is used where its events
        and pods may not be read. Raises JobNotFoundError."""
        from zerotrain.client.diagnosis import diagnose

        job = self.get(name)
        try:
            return diagnose(job, self.events(name, pods=True), self.pods(name))
        except ForbiddenError:
            return diagnose(job)

    def suspend(self, name: str) -> Job:
        """Suspend the job: all ranks checkpoint at one step and stop, and the job waits until it is
        resumed."""
        return self.patch(name, {"spec": {"suspend": True}})

    def resume(self, name: str) -> Job:
        """Resume the job from its newest durable checkpoint."""
        return self.patch(name, {"spec": {"suspend": False}})

    def scale(self, name: str, workers: int) -> Job:
        """Change the number of workers of a job with spec.elastic: a checkpoint, then another attempt."""
        return self.patch(name, {"spec": {"workers": workers}})

    @property
    def api_client(self) -> Any:
        """The kubernetes.client.ApiClient of this connection, for objects other than jobs."""
        return self.transport.api_client

    def worker_text(self, name: str, path: str, *, worker: int = 0) -> str | None:
        """Return a worker's answer at an HTTP path of `contract.worker_http`; None if the worker does not
        run."""
        return scrape.worker_text(self.transport, self.pods(name), path, worker=worker)

    def patch(self, name: str, change: Mapping[str, Any], *, dry_run: bool = False) -> Job:
        """Merge `change` into the job. Raises InvalidJobError for fields that may not change now."""
        path, what = job_path(self.namespace, name), f"job {name}"
        try:
            return Job.of(self.transport.patch(path, change, _write_query(dry_run), what=what))
        except NotFoundError as error:
            raise self.no_such_job(name) from error


def _write_query(dry_run: bool) -> dict[str, str]:
    query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict"}
    return query | ({"dryRun": "All"} if dry_run else {})


def _object_of(job: Mapping[str, Any] | Path | str) -> Mapping[str, Any]:
    if isinstance(job, Mapping):
        return job
    # Imported late: the models of the spec take longer than most requests.
    from zerotrain.client.jobfile import load_job

    found: Mapping[str, Any] = load_job(Path(job)).document.value
    return found


def _complete(raw: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """Return the job with its target namespace and without the fields that only the cluster writes."""
    meta = raw.get("metadata")
    if not isinstance(meta, Mapping) or not isinstance(meta.get("name"), str):
        raise InvalidJobError("metadata.name is missing", next_step="give the job a name")
    kept = {key: value for key, value in raw.items() if key != "status"}
    names = {
        key: value for key, value in meta.items() if key not in ("uid", "resourceVersion", "managedFields")
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        **kept,
        "metadata": {**names, "namespace": meta.get("namespace") or namespace},
    }


def merged_over(old: Mapping[str, Any], new: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return `new` at the version of `old`, with those labels and annotations of `old` that other clients
    have set.

    Labels and annotations that `owner` has set before, and that are not in `new`, are removed.
    """
    meta = {**old["metadata"]}
    meta.pop("managedFields", None)
    for kind in ("labels", "annotations"):
        ours = _owned(old, kind, owner)
        kept = {key: value for key, value in (meta.pop(kind, None) or {}).items() if key not in ours}
        if texts := kept | dict(new["metadata"].get(kind) or {}):
            meta[kind] = texts
    return {**new, "metadata": meta}


def _owned(old: Mapping[str, Any], kind: str, owner: str) -> set[str]:
    """Return the keys of the labels or annotations that this owner has set."""
    entries = Fields(old).part("metadata").parts("managedFields")
    mine = [entry for entry in entries if entry.text("manager") == owner]
    sets = [entry.part("fieldsV1").part("f:metadata").part(f"f:{kind}") for entry in mine]
    return {name.removeprefix("f:") for found in sets for name in found.names()}
