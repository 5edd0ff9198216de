"""Every attack of the modules `case_*`, one by one, all at once, and stored before the operator starts.

The admission policy is not installed: what it lets through is part of these attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from tests.cluster.hostile import case_names, case_sizes, case_texts
from tests.cluster.hostile.arena import Arena, all_at_once
from tests.cluster.hostile.bodies import Post
from tests.cluster.hostile.cases import CASES, Bystander, Case, batches
from tests.cluster.hostile.complaints import command_complaints
from tests.cluster.hostile.tenant import Answer
from tests.support.tiers import with_slow_rows

pytestmark = pytest.mark.cluster

ALONE = "tests/cluster/hostile/test_hostile_cases.py::test_alone_without_the_policy"
"""The test of each attack by itself, which takes less time than the tests of all together."""

UNSEEN = ("text-managed-by",)
"""Beginnings of the names of jobs that name another operator as their manager."""

TABLES = (case_names, case_sizes, case_texts)
"""Modules that fill CASES when they are imported."""


BATCHES = batches()
SLOW_ONES = ("fat-eight", "slow-touched", "names-touched", "deep-and-fat")
QUICK = [cases for cases in BATCHES if cases[0].name not in SLOW_ONES]


@pytest.fixture(scope="module")
def stage(fresh: Arena) -> Arena:
    """Provide an arena without the policy: the operator must withstand the attacks alone."""
    fresh.measure_baseline()
    return fresh


def test_there_are_enough_cases_and_the_tenant_is_one_of_its_namespace(stage: Arena) -> None:
    assert len(CASES) >= 60
    assert TABLES
    tenant, elsewhere = stage.tenant, stage.neighbour
    assert tenant.rights("create", "Pod", tenant.namespace)
    assert tenant.rights("create", "Secret", tenant.namespace)
    assert not tenant.rights("create", "ResourceQuota", tenant.namespace)
    assert not tenant.rights("get", "ZeroTrainingJob", elsewhere)
    assert not tenant.rights("create", "Pod", elsewhere)


def attack(stage: Arena, cases: Sequence[Case], mode: str) -> None:
    """Post the cases, run a neighbour's job after each, and check."""
    with stage.round():
        victim, _ = stage.bystander()
        posts: list[Post] = []
        for case in cases:
            answers = stage.attack(case, victim)
            posts += [post for post, answer in answered(case, victim, answers) if answer.accepted]
            stage.note(f"{case.name} {mode}", answers, stage.work())
        stage.wait_for_conditions([post for post in posts if not post.name.startswith(UNSEEN)])
        stage.expect(problems(stage, cases))


def answered(case: Case, victim: Bystander, answers: list[Answer]) -> list[tuple[Post, Answer]]:
    return list(zip(case.posts(victim), answers, strict=True))


def problems(stage: Arena, cases: Sequence[Case]) -> list[str]:
    """Return what is wrong now."""
    wrong = stage.complaints()
    for case in cases:
        pods = stage.pods_of(stage.tenant.namespace, case.name) if case.never_starts else []
        wrong += [f"{pod['metadata']['name']} exists" for pod in pods]
        wrong += case.check(stage.api, stage.tenant.namespace)
    return wrong + command_complaints(stage.cluster, stage.job_names(), "get", "-A")


@pytest.mark.parametrize("cases", with_slow_rows(BATCHES, quick=QUICK), ids=lambda cases: cases[0].name)
def test_alone_without_the_policy(stage: Arena, cases: list[Case]) -> None:
    attack(stage, cases, "alone")


@pytest.mark.slow(cheaper=ALONE)
def test_all_at_once_and_then_stored_before_the_operator_starts(stage: Arena) -> None:
    answers: list[Answer] = []
    waits: list[float] = []

    def post(case: Case) -> None:
        answers.extend(stage.attack(case, victim))

    def work() -> None:
        waits.append(stage.work())

    with stage.round():
        victim, _ = stage.bystander()
        all_at_once([*(partial(post, case) for case in CASES), *[work] * 5])
        waits.append(stage.work())
        stage.note("all at once", answers, max(waits))
        stage.expect(problems(stage, CASES))
        stage.restart()
        stage.note("stored", [], stage.work())
        stage.expect(problems(stage, CASES))
