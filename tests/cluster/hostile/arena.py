"""The shipped installation with the real operator, a tenant that attacks and a neighbour that works."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.hostile.bodies import COLLECTIONS, Post
from tests.cluster.hostile.cases import Bystander, Case
from tests.cluster.hostile.complaints import operator_complaints, statuses, stored_complaints
from tests.cluster.hostile.report import MIB, Report, Row, summed
from tests.cluster.hostile.tenant import Answer, Client, Tenant
from tests.operator.operator_process import OperatorProcess, install
from tests.support.devcluster import PATIENCE_S, Cluster, wait_until
from tests.support.jobs import ABSENT, job_json
from tests.support.kube_json import Json
from zerotrain.operator.constants import ANNOTATION_ENCRYPTED_VOLUMES

ENCRYPTED: Json = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "encrypted", "annotations": {ANNOTATION_ENCRYPTED_VOLUMES: "true"}},
    "provisioner": "example.com/nobody",
}
"""Storage class that `requireEncryptedVolume` of a hostile job names."""

MAX_SHOWN_COMPLAINTS = 15
"""Largest number of complaints in the message of a failure."""

MOST_GROWTH = 64 * MIB
"""Largest growth of the operator's resident memory over a whole run of attacks."""

JOBS = COLLECTIONS["ZeroTrainingJob"]
PODS = "/api/v1/namespaces/{}/pods?labelSelector=zerotrain.dev/job={}"


@dataclass
class Arena:
    """The parts of an arena; see `arena`."""

    cluster: Cluster
    tenant: Tenant
    neighbour: str
    """Namespace of the bystanders."""

    operator: OperatorProcess
    report: Report
    baseline: int = 0
    """Resident bytes of an operator that has seen no attack."""

    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.api = self.cluster.api
        self.admin = Client(self.cluster, self.cluster.token)

    def bystander(
        self, workers: int = 2, changes: Mapping[str, Any] | None = None
    ) -> tuple[Bystander, float]:
        """Create a job of the neighbour; return it and the seconds until it had all pods.

        Raises TimeoutError.
        """
        name = f"bystander-{next(self._numbers)}"
        small = {"spec.workers": workers, "spec.ranksPerWorker": 1, "spec.checkpoint": ABSENT}
        body = job_json({"metadata": {"name": name}, **small, **(changes or {})})
        began = time.monotonic()
        made = self.api.post(JOBS.format(self.neighbour), body)
        self.wait_for_pods(self.neighbour, name, workers)
        waited = time.monotonic() - began
        return Bystander(name=name, uid=made["metadata"]["uid"], namespace=self.neighbour), waited

    def wait_for_pods(self, namespace: str, name: str, count: int) -> None:
        def there() -> bool:
            if not self.operator.runs:
                raise AssertionError(f"the operator ended:\n{self.operator.tail()}")
            return len(self.pods_of(namespace, name)) == count

        try:
            wait_until(there, f"the {count} pods of {name}", timeout_s=PATIENCE_S, every_s=0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.operator.tail(30)}") from None

    def pods_of(self, namespace: str, name: str) -> list[Json]:
        """Return pods of the job of this name that the operator made: others do not name it as controller."""
        items = self.api.get(PODS.format(namespace, name))["items"]
        return [item for item in items if _controller(item) == name]

    def work(self) -> float:
        """Run and delete a job of the neighbour; return the seconds until it had its pods."""
        bystander, waited = self.bystander()
        self.dismiss(bystander)
        return waited

    def dismiss(self, bystander: Bystander) -> None:
        path = f"{JOBS.format(bystander.namespace)}/{bystander.name}"
        self.api.delete(path, bystander.uid)

    def attack(self, case: Case, bystander: Bystander) -> list[Answer]:
        """Post all objects of the case, and change its jobs as often as it says."""
        posts = case.posts(bystander)
        answers = [self.tenant.create(post) for post in posts]
        jobs = [post for post, answer in zip(posts, answers, strict=True) if answer.accepted]
        for number in range(case.touches):
            for post in jobs:
                self.tenant.touch(post, number)
        return answers

    def wait_for_conditions(self, posts: Sequence[Post]) -> None:
        """Wait until the operator has written conditions of each of these jobs that exists.

        Jobs that the API server rejected, or that are deleted, do not count. Raises TimeoutError.
        """
        names = {post.name for post in posts if post.kind == "ZeroTrainingJob"}

        def silent() -> list[str]:
            found = statuses(self.cluster, "-n", self.tenant.namespace)
            conditions = {name.partition("/")[2]: status.get("conditions") for name, status in found.items()}
            return sorted(name for name in names & conditions.keys() if not conditions[name])

        try:
            wait_until(lambda: not silent(), "conditions of every job", timeout_s=PATIENCE_S, every_s=0.3)
        except TimeoutError:
            raise TimeoutError(f"{silent()} have no condition\n{self.operator.tail(30)}") from None

    def note(self, name: str, answers: Sequence[Answer], waited_s: float) -> None:
        summary = summed([str(answer) for answer in answers])
        self.report.rows.append(Row(name=name, answers=summary, waited_s=waited_s, resident=self.resident()))

    def complaints(self, *, may_say: str = "") -> list[str]:
        """Return what is wrong now apart from the case itself: see `complaints.py`."""
        found = operator_complaints(self.operator, may_say=may_say)
        found += stored_complaints(self.cluster, self.api, self.tenant.namespace)
        grown = self.peak() - self.baseline
        if grown > MOST_GROWTH:
            found.append(
                f"the operator's memory rose by {grown / MIB:.0f} MiB over {self.baseline / MIB:.0f}"
            )
        return found

    def resident(self) -> int:
        return _memory(self.operator.pid, "VmRSS")

    def peak(self) -> int:
        return _memory(self.operator.pid, "VmHWM")

    def start(self) -> None:
        self.operator.start()

    def restart(self) -> None:
        """Start a new process, whatever the state of the last one."""
        self.operator.kill()
        self.operator.log.write_text("")
        self.operator.start()

    def measure_baseline(self) -> None:
        """Measure the memory of an operator that has run ordinary jobs alone."""
        self.start()
        for _ in range(3):
            self.work()
        self.baseline = self.peak()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Do one attack and remove all of its objects. If it fails, the next attack has a new operator."""
        if not self.operator.runs:
            self.restart()
        try:
            yield
        except BaseException:
            self.operator.kill()
            raise
        finally:
            self.clean()

    def expect(self, wrong: Sequence[str]) -> None:
        """Fail with these complaints if there are any."""
        more = f"\nand {len(wrong) - MAX_SHOWN_COMPLAINTS} more" if len(wrong) > MAX_SHOWN_COMPLAINTS else ""
        assert not wrong, "\n".join(wrong[:MAX_SHOWN_COMPLAINTS]) + more

    def clean(self) -> None:
        """Delete the objects of tenant and neighbour, and the events about them."""
        self.tenant.clean()
        self._delete_all(JOBS.format(self.neighbour))
        for namespace in (self.tenant.namespace, self.neighbour):
            # The garbage collector of a new cluster takes half a minute to discover a new kind of owners.
            self._delete_all(f"{COLLECTIONS['Pod'].format(namespace)}?gracePeriodSeconds=0")
            self._delete_all(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")
        wait_until(lambda: not self._left(), "the objects of tenant and neighbour to go")

    def _delete_all(self, path: str) -> None:
        wait_until(lambda: self.admin.delete_all(path), f"{path} to be deleted")

    def _left(self) -> list[str]:
        return [
            name
            for namespace in (self.tenant.namespace, self.neighbour)
            for kind in ("ZeroTrainingJob", "Pod")
            for name in self.admin.names(COLLECTIONS[kind].format(namespace))
        ]

    def job_names(self) -> list[str]:
        """Return the job names of both namespaces."""
        places = (self.tenant.namespace, self.neighbour)
        return [name for place in places for name in self.admin.names(JOBS.format(place))]


def _controller(item: Json) -> str:
    owners = item["metadata"].get("ownerReferences", ())
    return next((owner["name"] for owner in owners if owner.get("controller")), "")


def _memory(pid: int, line: str) -> int:
    """Return the bytes of a line of /proc/PID/status; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [row.split()[1] for row in text.splitlines() if row.startswith(f"{line}:")]
    return int(found[0]) * 1024 if found else 0


@contextmanager
def arena(cluster: Cluster, folder: Path, title: str) -> Iterator[Arena]:
    """Install everything; the operator does not run yet. The caller prints the report."""
    kubeconfig = install(cluster, folder)
    cluster.apply(ENCRYPTED)
    operator = OperatorProcess(kubeconfig, folder)
    with ExitStack() as stack:
        stack.callback(operator.kill)
        attacked, neighbour = (stack.enter_context(cluster.namespace()) for _ in range(2))
        yield Arena(
            cluster=cluster,
            tenant=Tenant(cluster, attacked),
            neighbour=neighbour,
            operator=operator,
            report=Report(title),
        )


def all_at_once(tasks: Sequence[Callable[[], object]], *, threads: int = 8) -> None:
    """Run the tasks concurrently to their end. Raises the exception of the first failed one."""
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()
