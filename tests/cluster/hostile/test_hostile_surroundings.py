"""Quotas, limits, policies and webhooks around the tenant, and ending namespaces, affect no neighbour."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from tests.cluster.hostile.arena import Arena
from tests.cluster.hostile.bodies import COLLECTIONS, Post, job
from tests.cluster.hostile.surroundings import dead_webhook, surroundings
from tests.support.devcluster import wait_until
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.cluster

Json = dict[str, Any]
ROWS = tuple(surroundings("x"))

SILENT = ("policy-of-status", "webhook-dead")
"""Surroundings in which the tenant's own jobs have no condition for a long time."""

SLOW_ROWS = ("quota-zero", "policy-of-deletion", "limits-huge")

READINESS_MESSAGES = {"policy-of-status": "cannot be written"}
"""Part of the further line of /readyz that is right in these surroundings."""


@pytest.fixture(scope="module")
def stage(fresh: Arena) -> Arena:
    fresh.measure_baseline()
    return fresh


def greedy_jobs() -> list[Post]:
    """Return jobs that request as much as a tenant may."""
    gpus = {"spec.resources": {"memory": "8Gi", "gpus": {"count": 8}}}
    return [
        job("greedy-wide", {"spec.workers": 10_000}),
        job("greedy-gpus", {"spec.workers": 500, **gpus}),
        *(job(f"greedy-{number}", {"spec.workers": 4}) for number in range(8)),
    ]


@contextmanager
def around(stage: Arena, objects: list[Json]) -> Iterator[None]:
    namespace = stage.tenant.namespace
    stage.cluster.apply(*objects, namespace=namespace)
    try:
        yield
    finally:
        for item in objects:
            stage.cluster.kubectl("delete", item["kind"], "hostile", "-n", namespace, "--ignore-not-found")


@pytest.mark.parametrize("name", with_slow_rows(ROWS, quick=[row for row in ROWS if row not in SLOW_ROWS]))
def test_a_namespace_with(stage: Arena, name: str) -> None:
    objects = surroundings(stage.tenant.namespace)[name]
    with stage.round(), around(stage, objects):
        # The API server's caches of quotas and policies are updated a moment later.
        stage.work()
        posts = greedy_jobs()
        answers = [stage.tenant.create(post) for post in posts]
        assert all(answer.accepted for answer in answers)
        stage.note(name, answers, max(stage.work() for _ in range(3)))
        if name not in SILENT:
            stage.wait_for_conditions(posts)
        if name not in READINESS_MESSAGES:
            # The API server may have applied the policy of the case before to the first writes of this one.
            with suppress(TimeoutError):  # the complaint says which status
                wait_until(
                    lambda: "cannot be written" not in stage.operator.get("/readyz"), "written statuses"
                )
        stage.expect(stage.complaints(may_say=READINESS_MESSAGES.get(name, "")))


class Silent:
    """A webhook that accepts every connection and never answers."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._held = listener, list[socket.socket]()
        self.url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def calls(self) -> int:
        return len(self._held)

    def first_hangs(self) -> bool:
        """Return whether the API server still waits for the first answer, until its timeout."""
        first = self._held[0]
        first.setblocking(False)
        with suppress(BlockingIOError):
            while first.recv(1 << 16):
                continue
            return False
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._held.append(self._listener.accept()[0])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._held:
            connection.close()


@contextmanager
def silent_webhook(stage: Arena, namespaces: list[str]) -> Iterator[Silent]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        found = stack.enter_context(closing(Silent(listener)))
        hook = dead_webhook(*namespaces, url=found.url, timeout_s=30)
        stack.enter_context(around(stage, [hook]))
        yield found


def test_namespaces_whose_webhook_hangs(stage: Arena) -> None:
    """The namespaces together request more creations, and more passes, than the operator runs at once.

    Each hangs for as long as it is retried, which is minutes; the neighbour waits for none of them.
    """
    with stage.round(), ExitStack() as stack:
        namespaces = [stack.enter_context(stage.cluster.namespace()) for _ in range(3)]
        webhook = stack.enter_context(silent_webhook(stage, namespaces))
        stage.work()
        posts = [*greedy_jobs(), *(job(f"more-{number}", {"spec.workers": 4}) for number in range(20))]
        for post in posts:
            for namespace in namespaces:
                path = COLLECTIONS["ZeroTrainingJob"].format(namespace)
                assert stage.admin.send("POST", path, post.body(namespace)).accepted
        wait_until(lambda: webhook.calls >= 24, "creations that hang")
        waited = stage.work()
        assert webhook.first_hangs(), "the neighbour waited for creations that hang"
        stage.note("webhook hangs", [], waited)
        stage.expect(stage.complaints())


def test_a_namespace_that_ends(stage: Arena) -> None:
    with stage.round():
        with stage.cluster.namespace() as ending:
            for post in greedy_jobs():
                path = COLLECTIONS["ZeroTrainingJob"].format(ending)
                assert stage.admin.send("POST", path, post.body(ending)).accepted
            stage.work()
        stage.note("namespace ends", [], max(stage.work() for _ in range(3)))
        stage.expect(stage.complaints())
        gone = ("get", "namespace", ending, "--ignore-not-found", "-o", "name")
        wait_until(lambda: not stage.cluster.kubectl(*gone).stdout, "the namespace to be gone")
