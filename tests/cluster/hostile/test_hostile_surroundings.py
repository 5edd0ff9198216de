"""Quotas, limits, policies and webhooks around the tenant, and namespaces that end: no neighbour notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.hostile.arena import Arena
from tests.cluster.hostile.bodies import COLLECTIONS, Post, job
from tests.cluster.hostile.surroundings import surroundings
from tests.support.devcluster import wait_until

pytestmark = pytest.mark.cluster

Json = dict[str, Any]
ROWS = tuple(surroundings("x"))

SILENT = ("policy-of-status", "webhook-dead")
"""Where the tenant's own jobs stay without a condition for long."""

TOLD = {"policy-of-status": "jobs cannot be written"}
"""Part of the further line of /readyz that is right there."""


@pytest.fixture(scope="module")
def stage(fresh: Arena) -> Arena:
    fresh.measure_baseline()
    return fresh


def greedy_jobs() -> list[Post]:
    """As much as a tenant may ask for."""
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


@pytest.mark.parametrize("name", ROWS)
def test_a_namespace_with(stage: Arena, name: str) -> None:
    objects = surroundings(stage.tenant.namespace)[name]
    with stage.round(), around(stage, objects):
        # The API server's caches of quotas and policies follow a moment later.
        stage.work()
        posts = greedy_jobs()
        answers = [stage.tenant.create(post) for post in posts]
        assert all(answer.accepted for answer in answers)
        stage.note(name, answers, max(stage.work() for _ in range(3)))
        if name not in SILENT:
            stage.wait_until_judged(posts)
        stage.expect(stage.complaints(may_say=TOLD.get(name, "")))


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
